"""Actions on weights: reload, roll back, sessions, buckets, groups of a trainer, labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from console.fields import BadField, Count, Int, Positive, Seconds
from console.services import roots, spool
from console.services.actions import Action, Label, parse_groups
from console.services.load import Load
from engine import messages as m

POLICIES = {
    "finish": "they end on the old weights",
    "in_place": "they go on with the new weights, KV kept",
    "retract": "they go on with the new weights, KV recomputed",
    "abort": "they end now",
}
STAGING_S = 600.0


class Update(Action, frozen=True, kw_only=True):
    """What every update of weights may say."""

    deadline_s = STAGING_S
    updates: ClassVar[bool] = True  # it may end as a new epoch

    token_step: Int | None = None
    weight_version: Label | None = None
    in_flight: Literal["finish", "in_place", "retract", "abort"] | None = None
    drain_timeout_s: Seconds = 60.0
    target: str | Int | list[Int] | None = None
    abort_all_requests: bool = False
    flush_cache: bool | None = None
    keep_pause: bool = False
    torch_empty_cache: bool = False
    dry_run: bool = False
    session_id: str | None = None
    checksum: str | None = None

    also = {"abort_all_request": "abort_all_requests"}

    @property
    def policy(self) -> str:
        return self.in_flight or ("abort" if self.abort_all_requests else "finish")

    @property
    def source(self) -> str:
        """Where the weights come from, for the lineage."""
        raise NotImplementedError

    @property
    def wait_s(self) -> float:
        return self.deadline_s + self.drain_timeout_s

    def will(self) -> list[str]:
        lines = [
            "Every rank reads and verifies the new weights while serving goes on.",
            "They commit at a step border; a refusal of any rank drops them everywhere.",
        ]
        if self.dry_run:
            lines[1] = "Dry run: then they are dropped on every rank."
        groups = parse_groups(self.target)
        if groups is not None:
            names = ", ".join(f"dp{dp}" for dp in groups)
            lines.append(f"Only {names} take them: the engine is mixed until the others follow.")
        return lines

    def impact(self, load: Load) -> str:
        if self.dry_run:
            return "No request is touched."
        touched = load.only(parse_groups(self.target))
        return touched.sentence(f"policy {self.policy}: {POLICIES[self.policy]}")

    def engine_fields(self) -> dict[str, Any]:
        return {**super().engine_fields(), "target": parse_groups(self.target)}


class ReloadWeights(Update, frozen=True, kw_only=True):
    name = "reload_weights"
    message = m.UpdateWeightFromDiskReqInput
    route = "/update_weights_from_disk"
    also = {**Update.also, "source": "model_path", "path": "model_path"}

    model_path: Annotated[str, msgspec.Meta(min_length=1)]
    load_format: Literal["auto", "safetensors"] = "auto"
    is_async: bool = False
    spool: bool = False

    def checked(self) -> Self:
        path = roots.weight_path(self.model_path)
        version = self.weight_version or path.name
        return msgspec.structs.replace(self, model_path=str(path), weight_version=version)

    @property
    def title(self) -> str:
        return f"Reload weights {self.weight_version or Path(self.model_path).name}"

    @property
    def aim(self) -> str:
        return roots.shown(self.model_path)

    @property
    def source(self) -> str:
        return roots.shown(self.model_path)


class RollBack(Update, frozen=True, kw_only=True):
    name = "roll_back"
    message = m.UpdateWeightFromDiskReqInput
    also = {**Update.also, "epoch": "from_epoch"}

    from_epoch: Positive

    @property
    def title(self) -> str:
        return f"Roll back to epoch {self.from_epoch}"

    @property
    def source(self) -> str:
        return f"epoch {self.from_epoch}"

    def will(self) -> list[str]:
        return [
            f"The weights of epoch {self.from_epoch} are read again and become a new epoch.",
            *super().will()[1:],
        ]


class BeginUpdate(Update, frozen=True, kw_only=True):
    name = "begin_weight_update"
    message = m.BeginWeightUpdateReqInput
    route = "/begin_weight_update"
    deadline_s = 30.0
    updates = False

    @property
    def title(self) -> str:
        return "Begin a weight update"

    @property
    def source(self) -> str:
        return "session"

    def will(self) -> list[str]:
        return ["A session opens; buckets are staged until it ends as one epoch or is dropped."]

    def impact(self, load: Load) -> str:
        return "No request is touched until the session ends."


class EndUpdate(Update, frozen=True, kw_only=True):
    name = "end_weight_update"
    message = m.EndWeightUpdateReqInput
    route = "/end_weight_update"

    drop: bool = False

    @property
    def title(self) -> str:
        return "Drop the weight update" if self.drop else "Commit the weight update"

    @property
    def source(self) -> str:
        return "session"

    def will(self) -> list[str]:
        if self.drop:
            return ["What was staged is dropped on every rank; the old weights serve on."]
        return ["What was staged becomes one new epoch at a step border."]


class UpdateFromTensor(Update, frozen=True, kw_only=True):
    """``path``: the spooled safetensors bytes, which only the HTTP route that wrote them knows."""

    name = "update_from_tensor"
    message = m.UpdateWeightsFromTensorReqInput
    route = "/update_weights_from_tensor"
    derived = frozenset({"path"})  # each time that the same tensors are sent they have another

    path: str
    size: Count = 0

    def checked(self) -> Self:
        if not spool.hand_on(self.path):
            raise BadField(f"send the tensors themselves to {self.route}", param="path")
        return self

    @property
    def title(self) -> str:
        return f"Update weights with {self.size / 2**20:.1f} MiB of tensors"

    @property
    def source(self) -> str:
        return "tensor"


class UpdateFromDistributed(Update, frozen=True, kw_only=True):
    name = "update_from_distributed"
    message = m.UpdateWeightsFromDistributedReqInput
    route = "/update_weights_from_distributed"

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[Count]] = []
    group_name: str = "weight_update_group"

    def checked(self) -> Self:
        if not self.names or not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise BadField("names, dtypes and shapes must be equally long lists", param="names")
        return self

    @property
    def title(self) -> str:
        return f"Receive {len(self.names)} tensors from group {self.group_name}"

    @property
    def args(self) -> dict[str, Any]:
        """A count, not thousands of names."""
        args = super().args
        for name in ("names", "dtypes", "shapes"):
            args.pop(name, None)
        return {**args, "tensors": len(self.names)}

    @property
    def source(self) -> str:
        return f"distributed ({self.group_name})"


class JoinGroup(Action, frozen=True, kw_only=True):
    name = "join_weight_group"
    message = m.InitWeightsUpdateGroupReqInput
    route = "/init_weights_update_group"
    deadline_s = 120.0

    master_address: Annotated[str, msgspec.Meta(min_length=1)]
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Count
    world_size: Annotated[int, msgspec.Meta(ge=2, le=2**31)]
    group_name: Label = "weight_update_group"
    backend: str = "gloo"

    @property
    def title(self) -> str:
        return f"Join group {self.group_name}"

    @property
    def aim(self) -> str:
        return f"{self.master_address}:{self.master_port}"

    def will(self) -> list[str]:
        return ["Every rank joins the trainer's group; serving goes on meanwhile."]


class LeaveGroup(Action, frozen=True, kw_only=True):
    name = "leave_weight_group"
    message = m.DestroyWeightsUpdateGroupReqInput
    route = "/destroy_weights_update_group"

    group_name: Label = "weight_update_group"

    @property
    def title(self) -> str:
        return f"Leave group {self.group_name}"

    @property
    def aim(self) -> str:
        return self.group_name

    def will(self) -> list[str]:
        return ["Every rank leaves the trainer's group."]


class Relabel(Action, frozen=True, kw_only=True):
    name = "relabel_weights"
    message = m.UpdateWeightVersionReqInput
    route = "/update_weight_version"
    deadline_s = 10.0

    new_version: Label
    abort_all_requests: bool = False

    @property
    def title(self) -> str:
        return f"Call the weights {self.new_version}"

    def will(self) -> list[str]:
        line = "The present epoch gets another name; no weight changes."
        return [line, "Every request ends now."] if self.abort_all_requests else [line]

    def impact(self, load: Load) -> str:
        if self.abort_all_requests:
            return load.sentence("they end now")
        return "No request is touched."
