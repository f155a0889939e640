"""The libraries of profiles and dumps as pages read them: compared, searched, pinned, gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.models import Dump, Profile
from engine.profiling.summary import summarize
from tests.engine.profiling.traces import pair_profile


@pytest.fixture
def viewer(sign_in, settings, tmp_path):
    settings.QUARTERDECK_HOME = tmp_path
    return sign_in("viewer")


@pytest.fixture
def two_profiles(viewer, tmp_path) -> Path:
    """Both merged; in the second one mm is slower on one rank."""
    for name, slow in (("p1", 0.0), ("p2", 15.0)):
        directory = tmp_path / "profiles" / name
        directory.mkdir(parents=True)
        pair_profile(directory, profile_id=name, slow=slow)
        summarize(directory, name)
        Profile.objects.create(recording_id=name, directory=directory, state="ready", actor="ada")
    return tmp_path / "profiles"


def test_two_profiles_are_compared_over_http(viewer, two_profiles):
    found = viewer.get("/api/profiles/compare?a=p1&b=p2").json()
    assert [(op["name"], op["change_us"]) for op in found["ops"][:2]] == [
        ("aten::mm", 7.5),
        ("gloo:all_reduce", -7.5),
    ]
    assert (found["a"]["id"], found["b"]["id"], found["left_out"]) == ("p1", "p2", 0)
    assert found["communication_share"] == [0.2, 0.125]
    page = viewer.get("/profiles/compare/?a=p1&b=p2")
    assert page.status_code == 200 and b"/api/profiles/compare?a=p1&amp;b=p2" in page.content
    assert viewer.get("/api/profiles/compare?a=p1&b=p3").status_code == 404


def test_a_profile_without_a_summary_is_not_compared_and_says_why(viewer, two_profiles):
    (two_profiles / "p2" / "summary-p2.json").unlink()
    refused = viewer.get("/api/profiles/compare?a=p1&b=p2")
    assert refused.status_code == 404
    assert "profile p2 has no summary" in refused.json()["error"]["message"]


def test_dumps_are_found_by_request_and_by_pin_and_say_when_their_files_went(viewer, tmp_path):
    for name, rids in (("d1", ["chat-77"]), ("d2", ["other"])):
        directory = tmp_path / "dumps" / name
        Dump.objects.create(
            recording_id=name, directory=directory, state="ready", actor="ada", rids=rids,
            pinned=name == "d2",
        )  # fmt: skip
    (tmp_path / "dumps" / "d1").mkdir(parents=True)

    def found(query: str) -> list[tuple[str, bool]]:
        return [(d["id"], d["expired"]) for d in viewer.get(f"/api/dumps?{query}").json()["dumps"]]

    assert found("q=chat-7") == [("d1", False)]
    assert found("pinned=yes") == [("d2", True)]
    assert found("q=chat&pinned=yes") == []
