"""Admin actions on engines and checkpoints: each asks on a page of its own, then goes through the
one door.

Path: the changelist's action menu -> here -> templates/admin/control_action.html (fields, preview,
reason) -> services/control.py.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html

from console.auth import Principal, principal_of_user
from console.models import Checkpoint, Engine, Job
from console.services import catalogue, control
from console.services.weight_actions import POLICIES
from engine.errors import QuarterdeckError

if TYPE_CHECKING:
    EngineBase = admin.ModelAdmin[Engine]
    CheckpointBase = admin.ModelAdmin[Checkpoint]
else:
    EngineBase = CheckpointBase = admin.ModelAdmin

IN_FLIGHT = [(name, f"{name}: {what}") for name, what in POLICIES.items()]
MODES = [
    ("retract", "retract: requests keep their tokens, drop their KV, go on later"),
    ("in_place", "in place: requests keep tokens and KV"),
    ("abort", "abort: requests end now"),
]


class ActionForm(forms.Form):
    """What every action asks; subclasses add the fields of theirs before it."""

    reason = forms.CharField(max_length=500, widget=forms.TextInput(attrs={"size": 60}))
    field_order: list[str] | None = None

    def given(self) -> dict[str, Any]:
        """The action's fields; empty ones are left out."""
        data = self._initial()
        if self.is_bound:
            self.full_clean()
            data = self.cleaned_data
        return {n: v for n, v in data.items() if n != "reason" and v not in (None, "")}

    def _initial(self) -> dict[str, Any]:
        return {name: self.get_initial_for_field(f, name) for name, f in self.fields.items()}


class PauseForm(ActionForm):
    mode = forms.ChoiceField(choices=MODES)
    lease_s = forms.FloatField(min_value=1, initial=1800, label="Ends by itself after, seconds")


class FlushForm(ActionForm):
    timeout_s = forms.FloatField(min_value=0, initial=0, label="Wait for requests, seconds")


class DrainForm(ActionForm):
    dp = forms.IntegerField(min_value=0, initial=0, label="Data-parallel rank")
    drain = forms.TypedChoiceField(
        choices=[("yes", "take no new requests"), ("no", "take requests again")],
        coerce=lambda word: word == "yes",
        initial="yes",
        label="It shall",
    )

    def _initial(self) -> dict[str, Any]:
        return super()._initial() | {"drain": True}


class WeightsForm(ActionForm):
    token_step = forms.IntegerField(required=False, min_value=0, label="Trainer's step")
    weight_version = forms.CharField(required=False, max_length=200, label="Version label")
    in_flight = forms.ChoiceField(choices=IN_FLIGHT, label="Running requests")
    target = forms.CharField(required=False, label="Groups", help_text="empty: all; 0,2: a canary")
    dry_run = forms.BooleanField(required=False, label="Dry run: verify on every rank, then drop")


class ReloadForm(WeightsForm):
    model_path = forms.CharField(label="Checkpoint", widget=forms.TextInput(attrs={"size": 60}))
    field_order = ["model_path"]


class ProfileForm(ActionForm):
    num_steps = forms.IntegerField(min_value=1, max_value=1000, initial=8, label="Steps")
    profile_by_stage = forms.BooleanField(required=False, label="Prefill and decode apart")
    record_shapes = forms.BooleanField(required=False, label="Shapes of tensors")
    with_stack = forms.BooleanField(required=False, label="Python stacks (slower)")


class DumpForm(ActionForm):
    modules = forms.CharField(initial="*", help_text="globs over module names, with commas")
    layers = forms.CharField(required=False, help_text="for example 0-3; empty: all")
    kinds = forms.CharField(initial="output, logits")
    ranks = forms.CharField(required=False, help_text="for example dp0-tp0; empty: all")
    rids = forms.CharField(required=False, label="Requests", help_text="empty: every request")
    max_steps = forms.IntegerField(min_value=1, initial=1, label="At most steps")


def principal_of_request(request: HttpRequest) -> Principal:
    assert request.user.is_authenticated
    return principal_of_user(request.user)


def may_control(request: HttpRequest) -> bool:
    return principal_of_request(request).may("control_engine")


def ask_then_act(
    model_admin: admin.ModelAdmin[Any],
    request: HttpRequest,
    queryset: QuerySet[Any],
    *,
    action: str,
    name: str,
    form_class: type[ActionForm],
    fixed: dict[str, Any] | None = None,
    initial: dict[str, Any] | None = None,
) -> HttpResponse | None:
    """The page between menu and deed. ``action``: of the menu; ``name``: of the door."""
    sent = "apply" in request.POST or "preview" in request.POST
    form = form_class(request.POST if sent else None, initial=initial)
    form.fields["reason"].required = "preview" not in request.POST
    if "apply" in request.POST and form.is_valid():
        _act(model_admin, request, name, form, fixed or {})
        return None
    try:
        seen: control.Preview | None = async_to_sync(control.preview)(
            principal_of_request(request), name, {**form.given(), **(fixed or {})},
            base_url=f"{request.scheme}://{request.get_host()}",
        )  # fmt: skip
    except QuarterdeckError as error:
        form.add_error(None, error.message) if form.is_bound else None
        seen = None
    context = {
        **model_admin.admin_site.each_context(request),
        "title": name.replace("_", " ").capitalize(),
        "opts": model_admin.model._meta,
        "objects": queryset,
        "form": form,
        "preview": seen,
        "action": action,
        "key": request.POST.get("key") or uuid.uuid4().hex,
        "checkbox": ACTION_CHECKBOX_NAME,
    }
    return TemplateResponse(request, "admin/control_action.html", context)


def _act(
    model_admin: admin.ModelAdmin[Any],
    request: HttpRequest,
    name: str,
    form: ActionForm,
    fixed: dict[str, Any],
) -> None:
    try:
        job = async_to_sync(_performed)(
            principal_of_request(request), name, {**form.given(), **fixed},
            via="admin", reason=form.cleaned_data["reason"], key=request.POST.get("key"),
        )  # fmt: skip
    except QuarterdeckError as error:
        model_admin.message_user(request, error.message, messages.ERROR)
        return
    good = job.state in (Job.State.DONE, Job.State.PARTIAL, Job.State.RUNNING)
    link = format_html(
        '<a href="/jobs/{}/">job {}</a>: {} {}', job.pk, job.pk, job.state, job.message
    )
    model_admin.message_user(request, link, messages.SUCCESS if good else messages.ERROR)


async def _performed(principal: Principal, name: str, given: dict[str, Any], **said: Any) -> Job:
    """The job once it has ended, or begun where that is what the engine answers."""
    doing = await control.start(principal, name, given, **said)
    kind = catalogue.find(name)
    return await (doing.begun(kind.deadline_s) if kind.answers_early else doing.ended())


class ControlPermission:
    """For ``@admin.action(permissions=["control"])``."""

    def has_control_permission(self, request: HttpRequest) -> bool:
        return may_control(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


@admin.register(Engine)
class EngineAdmin(ControlPermission, EngineBase):
    list_display = ("__str__", "state", "weight_version", "token_step", "epoch", "seen_at")
    actions = (
        "reload_weights",
        "pause_engine",
        "continue_engine",
        "flush_cache",
        "drain_rank",
        "abort_all",
        "profile_merge",
        "lazy_dump",
    )

    @admin.action(description="Reload weights", permissions=["control"])
    def reload_weights(
        self, request: HttpRequest, queryset: QuerySet[Engine]
    ) -> HttpResponse | None:
        return ask_then_act(
            self, request, queryset,
            action="reload_weights", name="reload_weights", form_class=ReloadForm,
        )  # fmt: skip

    @admin.action(description="Pause", permissions=["control"])
    def pause_engine(self, request: HttpRequest, queryset: QuerySet[Engine]) -> HttpResponse | None:
        return ask_then_act(
            self, request, queryset, action="pause_engine", name="pause", form_class=PauseForm
        )

    @admin.action(description="Continue", permissions=["control"])
    def continue_engine(
        self, request: HttpRequest, queryset: QuerySet[Engine]
    ) -> HttpResponse | None:
        return ask_then_act(
            self, request, queryset,
            action="continue_engine", name="continue", form_class=ActionForm,
        )  # fmt: skip

    @admin.action(description="Flush cache", permissions=["control"])
    def flush_cache(self, request: HttpRequest, queryset: QuerySet[Engine]) -> HttpResponse | None:
        return ask_then_act(
            self, request, queryset, action="flush_cache", name="flush_cache", form_class=FlushForm
        )

    @admin.action(description="Drain a rank", permissions=["control"])
    def drain_rank(self, request: HttpRequest, queryset: QuerySet[Engine]) -> HttpResponse | None:
        return ask_then_act(
            self, request, queryset, action="drain_rank", name="drain_rank", form_class=DrainForm
        )

    @admin.action(description="Abort all requests", permissions=["control"])
    def abort_all(self, request: HttpRequest, queryset: QuerySet[Engine]) -> HttpResponse | None:
        return ask_then_act(
            self, request, queryset, action="abort_all", name="abort_all", form_class=ActionForm
        )

    @admin.action(description="Profile (merge)", permissions=["control"])
    def profile_merge(
        self, request: HttpRequest, queryset: QuerySet[Engine]
    ) -> HttpResponse | None:
        return ask_then_act(
            self, request, queryset,
            action="profile_merge", name="profile", form_class=ProfileForm,
            fixed={"merge_profiles": True},
        )  # fmt: skip

    @admin.action(description="Lazy dump", permissions=["control"])
    def lazy_dump(self, request: HttpRequest, queryset: QuerySet[Engine]) -> HttpResponse | None:
        return ask_then_act(
            self, request, queryset, action="lazy_dump", name="dump", form_class=DumpForm
        )


@admin.register(Checkpoint)
class CheckpointAdmin(ControlPermission, CheckpointBase):
    list_display = ("path", "state", "token_step", "run", "bytes", "registered_at", "registered_by")
    list_filter = ("state", "run")
    search_fields = ("path", "run", "note", "checksum")
    actions = ("reload_weights",)

    @admin.action(description="Reload weights from this checkpoint", permissions=["control"])
    def reload_weights(
        self, request: HttpRequest, queryset: QuerySet[Checkpoint]
    ) -> HttpResponse | None:
        checkpoint = queryset.first()
        if checkpoint is None or queryset.count() != 1:
            self.message_user(request, "Select one checkpoint.", messages.WARNING)
            return None
        return ask_then_act(
            self, request, queryset,
            action="reload_weights", name="reload_weights", form_class=WeightsForm,
            fixed={"model_path": checkpoint.path},
            initial={"token_step": checkpoint.token_step},
        )  # fmt: skip
