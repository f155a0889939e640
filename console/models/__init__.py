"""Everything the console stores. Queries live on the QuerySets, verbs in ``services``."""

from console.models.audit import AuditEntry, AuditHead
from console.models.chat import Conversation, Message
from console.models.dumps import Dump
from console.models.engines import Engine, Serving
from console.models.jobs import Job
from console.models.keys import ApiKey
from console.models.profiles import Profile
from console.models.rights import Right
from console.models.weights import Checkpoint, WeightUpdate

__all__ = [
    "ApiKey",
    "AuditEntry",
    "AuditHead",
    "Checkpoint",
    "Conversation",
    "Dump",
    "Engine",
    "Job",
    "Message",
    "Profile",
    "Right",
    "Serving",
    "WeightUpdate",
]
