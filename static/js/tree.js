// A conversation as a tree of messages and as the turns that are on screen. Pure.

/**
 * Turns on the way to message `head` (default: the newest): [{user, answers, lead, rivals, at}]. `answers`
 * is one, or all of a comparison, and `lead` the one that the talk goes on from; `rivals` are the ids of
 * the questions at the same place and `at` is the place of this one among them.
 */
export function turnsOf(messages, head = null) {
  const known = new Map(messages.map((message) => [message.id, message]));
  const below = (parent, role) => messages.filter((message) => message.parent === parent && message.role === role);
  const turns = [];
  for (const message of pathTo(known, head ?? messages.at(-1)?.id)) {
    const turn = turns.at(-1);
    if (message.role === "assistant" && turn) {
      turn.lead = message;
      turn.answers = message.compare ? below(message.parent, "assistant").filter(({ compare }) => compare) : [message];
    }
    if (message.role !== "user") continue;
    const rivals = below(message.parent, "user");
    turns.push({ user: message, answers: [], lead: null, rivals: rivals.map(({ id }) => id), at: rivals.indexOf(message) });
  }
  return turns;
}

function pathTo(known, head) {
  const path = [];
  for (let message = known.get(head); message; message = known.get(message.parent)) path.unshift(message);
  return path;
}

/** The newest message at or below `id`: where the branch of that question goes on. */
export function newestBelow(messages, id) {
  const below = new Set([id]);
  let newest = id;
  for (const message of messages) {
    if (!below.has(message.parent)) continue;
    below.add(message.id);
    newest = message.id;
  }
  return newest;
}
