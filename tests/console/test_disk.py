"""The disk budget: oldest first, pins stay, no write without room; spools are checked bytes."""

from __future__ import annotations

import base64
import json
import os
import resource
import struct
import time

import pytest
from django.core.management import call_command

from console.services import disk, spool
from console.services.disk import NoSpace
from engine.errors import BadRequest

KB = 1000
SAFETENSORS = struct.pack("<Q", 2) + b"{}"
PICKLE = b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94."


@pytest.fixture
def home(tmp_path, settings):
    settings.QUARTERDECK_HOME = tmp_path
    settings.QUARTERDECK_DISK_QUOTA_GB = 10 * KB / 10**9
    return tmp_path


def put(home, path: str, kilobytes: int, *, age_s: float = 1000, pinned: bool = False):
    file = home / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * kilobytes * KB)
    if pinned:
        (file.parent / disk.PIN).touch()
    moment = time.time() - age_s
    for changed in file.parent.iterdir():
        os.utime(changed, (moment, moment))
    return file.parent


def test_the_oldest_items_make_room(home):
    old = put(home, "profiles/a/trace", 4, age_s=3000)
    middle = put(home, "dumps/b/tensors", 4, age_s=2000)
    young = put(home, "profiles/c/trace", 2, age_s=1000)
    assert disk.make_room(3 * KB) == [str(old)]
    assert (old.exists(), middle.exists(), young.exists()) == (False, True, True)
    assert disk.usage()["used_bytes"] == 6 * KB


def test_pinned_items_and_spools_stay_and_what_does_not_fit_is_refused(home):
    pinned = put(home, "profiles/a/trace", 4, pinned=True)
    put(home, "spool/x.safetensors", 5)
    with pytest.raises(NoSpace, match="QUARTERDECK_DISK_QUOTA_GB"):
        disk.make_room(3 * KB)
    assert pinned.exists()
    assert (home / "spool" / "x.safetensors").exists()


def test_an_item_that_is_being_written_stays(home):
    fresh = put(home, "profiles/a/trace", 9, age_s=0)
    with pytest.raises(NoSpace):
        disk.make_room(5 * KB)
    assert fresh.exists()


def test_a_full_disk_is_refused_whatever_the_quota_says(home, settings, monkeypatch):
    settings.QUARTERDECK_DISK_QUOTA_GB = 10**6
    usage = disk.shutil.disk_usage(home)
    free = usage._replace(free=disk.SPARE_BYTES + 10)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: free)
    disk.make_room(10)
    with pytest.raises(NoSpace):
        disk.make_room(11)


def test_a_file_with_a_pin_beside_it_stays(home):
    directory = put(home, "dumps/one.tar", 4)
    (directory / "one.tar.pinned").touch()
    put(home, "profiles/b/trace", 4)
    disk.make_room(5 * KB)
    assert (directory / "one.tar").exists()


def test_tidy_is_a_command_with_one_line_of_json(home, capsys):
    put(home, "profiles/a/trace", 12)
    call_command("disk", "tidy")
    told = json.loads(capsys.readouterr().out)
    assert (len(told["deleted"]), told["used_bytes"]) == (1, 0)


# ---------------------------------------------------------------- spools


async def stream(*chunks: bytes):
    for chunk in chunks:
        yield chunk


async def test_a_body_is_spooled_in_any_chunks(home):
    for size in (1, 3, 100):
        chunks = [SAFETENSORS[i : i + size] for i in range(0, len(SAFETENSORS), size)]
        spooled = await spool.write_stream(stream(*chunks), len(SAFETENSORS))
        with open(spooled.path, "rb") as file:
            assert file.read() == SAFETENSORS
        spooled.discard()
    assert list((home / "spool").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (PICKLE, "engine/weights/sender.py"),
        (b"PK\x03\x04" + b"x" * 40, "engine/weights/sender.py"),
        (b"", "no safetensors"),
        (b"hello world, these are no weights", "no safetensors"),
    ],
)
async def test_what_is_no_safetensors_is_refused_and_leaves_nothing(home, content, said):
    with pytest.raises(BadRequest, match=said):
        await spool.write_stream(stream(content), len(content))
    assert list((home / "spool").iterdir()) == []


async def test_a_body_that_is_cut_off_is_refused_and_leaves_nothing(home):
    with pytest.raises(BadRequest, match="announced"):
        await spool.write_stream(stream(SAFETENSORS), len(SAFETENSORS) + 5)
    assert list((home / "spool").iterdir()) == []


async def test_a_disk_that_is_full_after_all_is_refused_and_leaves_nothing(home, settings):
    """Room was made, then somebody else took it."""
    settings.QUARTERDECK_DISK_QUOTA_GB = 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * KB, before[1]))
    try:
        with pytest.raises(NoSpace):
            await spool.write_stream(stream(SAFETENSORS, b"x" * 200 * KB), 10 + 200 * KB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((home / "spool").iterdir()) == []


async def test_room_is_made_before_the_first_byte(home):
    async def never():
        raise AssertionError("the body was read")
        yield b""

    with pytest.raises(NoSpace):
        await spool.write_stream(never(), 20 * KB)


def test_base64_may_come_once_or_the_same_for_each_rank():
    text = base64.b64encode(SAFETENSORS).decode()
    assert spool.from_base64(text) == spool.from_base64([text, text]) == SAFETENSORS
    with pytest.raises(BadRequest, match="each"):
        spool.from_base64([text, base64.b64encode(b"other").decode()])
    with pytest.raises(BadRequest, match="base64"):
        spool.from_base64(["not base64!"])
