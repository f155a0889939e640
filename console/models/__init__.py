"""Everything the console stores. Queries live on the QuerySets, verbs in ``services``."""

from console.models.chat import Conversation, Message
from console.models.keys import ApiKey
from console.models.rights import Right

__all__ = ["ApiKey", "Conversation", "Message", "Right"]
