// A conversation as a tree of messages and as the turns that are on screen. Pure.

/** Turns on the way to the newest message: [{user, answers: [messages shown], rivals, at}]. */
export function turnsOf(messages, head = null) {
  const known = new Map(withParents(messages).map((message) => [message.id, message]));
  const path = [];
  for (let id = head ?? messages.at(-1)?.id; id !== null && known.has(id); id = known.get(id).parent) path.unshift(known.get(id));
  const children = (id) => [...known.values()].filter((message) => message.parent === id);
  const turns = [];
  for (const message of path) {
    if (message.role === "user") {
      const rivals = children(message.parent).filter(({ role }) => role === "user");
      turns.push({ user: message, answers: [], answerRivals: [], rivals, at: rivals.indexOf(message) });
    } else if (message.role === "assistant" && turns.length) {
      const turn = turns.at(-1);
      const all = children(turn.user.id).filter(({ role }) => role === "assistant");
      turn.answers = message.compare ? all.filter(({ compare }) => compare) : [message];
      turn.answerRivals = message.compare ? [] : all;
    }
  }
  return turns;
}

/** Messages without parents are a chain in their order. */
function withParents(messages) {
  return messages.map((message, index) => (message.parent === undefined ? { ...message, parent: messages[index - 1]?.id ?? null } : message));
}

/** The newest message below `id`: where a branch goes on. */
export function newestBelow(messages, id) {
  let newest = id;
  for (const message of withParents(messages)) if (message.parent === newest || isBelow(messages, message, id)) newest = message.id;
  return newest;
}

function isBelow(messages, message, id) {
  const known = new Map(withParents(messages).map((one) => [one.id, one]));
  for (let at = message.parent; at !== null && known.has(at); at = known.get(at).parent) if (at === id) return true;
  return false;
}
