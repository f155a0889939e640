"""The audit: a chain that shows every change, guarded by classes, triggers and verification."""

from __future__ import annotations

import csv
import io
import threading

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction

from console.models import AuditEntry, AuditHead
from console.models.audit import UNGUARDS, AppendOnly
from console.services import audit


def entry(**fields) -> AuditEntry:
    given = {"actor": "user:admin", "via": "page", "action": "pause", "target": "engine",
             "result": "done"}  # fmt: skip
    return audit.append(**(given | fields))


def tamper(sql: str, *parameters) -> None:
    """As somebody would who has the database's password and drops the guards first."""
    with connection.cursor() as cursor:
        for statement in UNGUARDS[connection.vendor]:
            cursor.execute(statement)
        cursor.execute(sql, parameters)


def test_each_entry_carries_the_hash_of_the_one_before(database):
    entries = [entry(reason=str(i)) for i in range(5)]
    assert [e.previous for e in entries[1:]] == [e.hash for e in entries[:-1]]
    verdict = audit.verify()
    assert (verdict.ok, verdict.entries) == (True, 5)


@pytest.mark.parametrize(
    "field", ["actor", "reason", "result", "action", "target", "at", "detail", "job"]
)
def test_a_changed_field_is_found_and_named(database, field):
    entries = [entry() for _ in range(3)]
    values = {"at": "2020-01-01 00:00:00", "detail": '{"x": 1}', "job": 99}
    value = values.get(field, "other")
    tamper(f"UPDATE console_auditentry SET {field} = %s WHERE id = %s", value, entries[1].pk)
    verdict = audit.verify()
    assert (verdict.ok, verdict.broken_at) == (False, entries[1].pk)


def test_a_missing_entry_is_found_in_the_middle_and_at_the_end(database):
    entries = [entry() for _ in range(4)]
    tamper("DELETE FROM console_auditentry WHERE id = %s", entries[1].pk)
    assert audit.verify().broken_at == entries[2].pk
    tamper("DELETE FROM console_auditentry")
    verdict = audit.verify()
    assert not verdict.ok
    assert "4 were written" in verdict.problem


def test_our_own_classes_refuse_to_change_or_delete(database):
    first = entry()
    with pytest.raises(AppendOnly):
        first.save()
    with pytest.raises(AppendOnly):
        first.delete()
    with pytest.raises(AppendOnly):
        AuditEntry.objects.update(actor="nobody")
    with pytest.raises(AppendOnly):
        AuditEntry.objects.all().delete()


@pytest.mark.parametrize("sql", ["UPDATE console_auditentry SET actor = 'x'",
                                 "DELETE FROM console_auditentry"])  # fmt: skip
def test_the_database_refuses_what_goes_round_our_classes(database, sql):
    entry()
    with pytest.raises(DatabaseError, match="append-only"), connection.cursor() as cursor:
        cursor.execute(sql)
    assert audit.verify().ok


def test_writers_at_the_same_time_make_one_chain(database):
    def write():
        for _ in range(10):
            entry()
        connection.close()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    verdict = audit.verify()
    assert (verdict.ok, verdict.entries) == (True, 40)


def test_an_entry_of_a_transaction_that_fails_is_not_there(database):
    entry()
    with pytest.raises(RuntimeError), transaction.atomic():
        entry()
        raise RuntimeError
    assert AuditEntry.objects.count() == AuditHead.objects.get().count == 1
    assert audit.verify().ok


def test_a_change_of_the_engine_is_written_once_whoever_sees_it(database):
    at = entry().at
    seen = [audit.note_change(notice="n1", at=at, action="pause_lease_expired", text="x")
            for _ in range(3)]  # fmt: skip
    assert seen == [True, False, False]
    assert AuditEntry.objects.filter(notice="n1").count() == 1


def test_verify_on_the_command_line_says_where_it_breaks(database, capsys):
    first = entry()
    call_command("audit", "verify")
    assert capsys.readouterr().out.strip() == "1 entries, unbroken"
    tamper("UPDATE console_auditentry SET actor = 'x'")
    with pytest.raises(CommandError, match=f"entry {first.pk} was changed"):
        call_command("audit", "verify")


def test_an_export_cannot_run_as_a_formula(database, sign_in):
    entry(reason="=HYPERLINK(1)")
    response = sign_in("viewer").get("/api/audit/export.csv")
    [row] = csv.DictReader(io.StringIO(response.content.decode()))
    assert row["reason"] == "'=HYPERLINK(1)"
    assert "attachment" in response["Content-Disposition"]


def test_an_export_as_json_can_be_verified_elsewhere(database, sign_in):
    entries = [entry(), entry()]
    found = sign_in("viewer").get("/api/audit/export.json").json()
    assert [row["hash"] for row in found] == [e.hash for e in entries]
    assert found[1]["previous"] == found[0]["hash"]


def test_the_list_filters_and_pages(database, sign_in):
    for number in range(60):
        entry(actor=f"user:{number % 2}", action="pause" if number % 3 else "continue")
    client = sign_in("viewer")
    first = client.get("/api/audit").json()
    assert (len(first["entries"]), first["next"]) == (50, 50)
    assert len(client.get("/api/audit?offset=50").json()["entries"]) == 10
    found = client.get("/api/audit?actor=user:1&action=continue").json()["entries"]
    assert {(row["actor"], row["action"]) for row in found} == {("user:1", "continue")}
    assert client.get(f"/api/audit?q={first['entries'][0]['hash'][:12]}").json()["entries"]
