"""Every action by name. To add one: a class, a line here; page, admin and API know it then."""

from __future__ import annotations

from console.services import actions, file_actions, recording_actions, weight_actions
from console.services.actions import Action
from engine.errors import NotFound

ACTIONS: dict[str, type[Action]] = {
    action.name: action
    for action in (
        actions.Pause,
        actions.Continue,
        actions.FlushCache,
        actions.AbortRequest,
        actions.AbortAll,
        actions.DrainRank,
        actions.ReleaseMemory,
        actions.ResumeMemory,
        actions.SlowDown,
        actions.FreezeGC,
        actions.ConfigureLogging,
        weight_actions.ReloadWeights,
        weight_actions.RollBack,
        weight_actions.BeginUpdate,
        weight_actions.EndUpdate,
        weight_actions.UpdateFromTensor,
        weight_actions.UpdateFromDistributed,
        weight_actions.JoinGroup,
        weight_actions.LeaveGroup,
        weight_actions.Relabel,
        file_actions.RegisterCheckpoint,
        file_actions.TidyDisk,
        recording_actions.Profile,
        recording_actions.StopProfile,
        recording_actions.DumpTensors,
        recording_actions.StopDump,
        recording_actions.MergeProfile,
    )
}


def find(name: str) -> type[Action]:
    """Raises ``NotFound``."""
    if name not in ACTIONS:
        raise NotFound(f"there is no action {name!r}; there are {', '.join(sorted(ACTIONS))}")
    return ACTIONS[name]
