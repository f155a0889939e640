// A conversation as a tree of messages and as the turns that are on screen. Pure.

/**
 * Turns on the way to message `head` (default: the newest):
 * [{user, answer, rivals, at}], where `rivals` are the questions that were asked at the same place
 * and `at` is the place of this one among them. `answer` is null while there is none.
 */
export function turnsOf(messages, head = null) {
  const known = new Map(messages.map((message) => [message.id, message]));
  const turns = [];
  for (const message of pathTo(known, head ?? messages.at(-1)?.id)) {
    if (message.role === "assistant" && turns.length) turns.at(-1).answer = message;
    if (message.role !== "user") continue;
    const rivals = messages.filter(({ role, parent_id: parent }) => role === "user" && parent === message.parent_id);
    turns.push({ user: message, answer: null, rivals: rivals.map(({ id }) => id), at: rivals.indexOf(message) });
  }
  return turns;
}

function pathTo(known, head) {
  const path = [];
  for (let message = known.get(head); message; message = known.get(message.parent_id)) path.unshift(message);
  return path;
}

/** The newest message at or below `id`: where the branch of that question goes on. */
export function newestBelow(messages, id) {
  const below = new Set([id]);
  let newest = id;
  for (const message of messages) {
    if (!below.has(message.parent_id)) continue;
    below.add(message.id);
    newest = message.id;
  }
  return newest;
}
