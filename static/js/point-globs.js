// Globs over dump points, as engine/dumps/points.py reads them (Python's fnmatchcase). Pure.

/** "model.layers.*.mlp, lm_head" -> its globs. */
export function globsIn(text) {
  return text.split(",").map((word) => word.trim()).filter(Boolean);
}

/** `*` any text, `?` one letter, `[seq]` and `[!seq]` a letter of a set; anything else is itself. */
export function globPattern(glob) {
  let pattern = "";
  for (let at = 0; at < glob.length; at += 1) {
    const letter = glob[at];
    const end = letter === "[" ? glob.indexOf("]", at + (glob[at + 1] === "!" ? 3 : 2)) : -1;
    if (letter === "*") pattern += ".*";
    else if (letter === "?") pattern += ".";
    else if (end > 0) {
      const inside = glob.slice(at + 1, end).replace(/[\\\]^]/g, "\\$&");
      pattern += `[${inside.startsWith("!") ? `^${inside.slice(1)}` : inside}]`;
      at = end;
    } else pattern += letter.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  }
  return new RegExp(`^${pattern}$`, "s");
}

/** "0-3,7" -> a set of layers, null for "" (all), undefined for what is no such list. */
export function layersIn(text) {
  if (!text.trim()) return null;
  const layers = new Set();
  for (const part of text.split(",")) {
    const [, first, last = first] = /^\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*$/.exec(part) ?? [];
    if (first === undefined || Number(last) < Number(first)) return undefined;
    for (let layer = Number(first); layer <= Number(last); layer += 1) layers.add(layer);
  }
  return layers;
}

/** Names of `points` [{name}] that some of `globs` matches. */
export function namesMatching(points, globs) {
  const patterns = globs.map(globPattern);
  return new Set(points.filter(({ name }) => patterns.some((pattern) => pattern.test(name))).map(({ name }) => name));
}

/**
 * What a dump would hold: {points: chosen points, tensors: how many each step gives, problems: {modules, layers}} with
 * a sentence for a field that the engine would refuse.
 */
export function selection(points, { modules, layers, kinds }) {
  const globs = globsIn(modules);
  const wanted = layersIn(layers);
  const problems = { modules: "", layers: "" };
  if (wanted === undefined) problems.layers = "Not a list like 0-3,7.";
  const beyond = [...(wanted ?? [])].find((layer) => !points.some((point) => point.layer === layer));
  if (beyond !== undefined) problems.layers = `The model has no layer ${beyond}.`;
  const inside = wanted ? points.filter(({ layer }) => wanted.has(layer)) : points;
  const idle = globs.find((glob) => !namesMatching(inside, [glob]).size);
  if (!globs.length) problems.modules = "Name at least one module, or * for all.";
  else if (idle !== undefined && !problems.layers) {
    problems.modules = namesMatching(points, [idle]).size ? `${idle} matches points of other layers only.` : `No dump point matches ${idle}.`;
  }
  const names = namesMatching(inside, globs);
  const chosen = inside.filter((point) => names.has(point.name) && point.kinds.some((kind) => kinds.includes(kind)));
  if (names.size && !chosen.length && !problems.modules) {
    const given = new Set(inside.filter(({ name }) => names.has(name)).flatMap((point) => point.kinds));
    problems.modules = `These points give ${[...given].sort().join(", ")}: choose one of them.`;
  }
  const tensors = chosen.reduce((sum, point) => sum + point.kinds.filter((kind) => kinds.includes(kind)).length, 0);
  return { points: chosen, tensors, problems };
}

/** Names of points at and below a node of `treeOf`. */
export function namesUnder(node, points) {
  return [...node.points.map((index) => points[index].name), ...[...node.children.values()].flatMap((child) => namesUnder(child, points))];
}

/** The fewest globs for exactly the points `names` of a tree: a whole branch is one or two. */
export function coverOf(node, points, names) {
  const under = namesUnder(node, points);
  if (!under.some((name) => names.has(name))) return [];
  const own = node.points.length > 0;
  if (node.path && under.every((name) => names.has(name))) return [...(own ? [node.path] : []), ...(node.children.size ? [`${node.path}.*`] : [])];
  const self = own && names.has(node.path) ? [node.path] : [];
  return [...self, ...[...node.children.values()].flatMap((child) => coverOf(child, points, names))];
}

/** The text of globs after a node of the tree was chosen or not; globs that it does not touch stay as they are. */
export function toggled(text, root, node, points, on) {
  const globs = globsIn(text);
  const mine = new Set(namesUnder(node, points));
  if (on) {
    const wider = globs.filter((glob) => !namesMatching(points, [glob]).size || [...namesMatching(points, [glob])].some((name) => !mine.has(name)));
    return [...wider, ...coverOf(node, points, mine)].join(", ");
  }
  const touching = (glob) => [...namesMatching(points, [glob])].some((name) => mine.has(name));
  const kept = globs.filter((glob) => !touching(glob));
  const rest = namesMatching(points, globs.filter(touching));
  for (const name of [...mine, ...namesMatching(points, kept)]) rest.delete(name);
  return [...kept, ...coverOf(root, points, rest)].join(", ");
}
