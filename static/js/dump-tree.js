// Points of a dump as a tree of modules, in execution order. Pure.

/** Nested {name, path, children: Map, points: [index]} of points [{path}], "model.layers.0.mlp" by its dots. */
export function treeOf(points) {
  const root = { name: "", path: "", children: new Map(), points: [] };
  points.forEach(({ path }, index) => {
    let node = root;
    for (const name of path.split(".")) {
      if (!node.children.has(name)) node.children.set(name, { name, path: node.path ? `${node.path}.${name}` : name, children: new Map(), points: [] });
      node = node.children.get(name);
    }
    node.points.push(index);
  });
  return root;
}

/** Children of a node as lists; chains with one child and no points become one line, "model.layers". */
export function collapsed(node) {
  return [...node.children.values()].map((child) => {
    let at = child;
    let { name } = child;
    while (at.children.size === 1 && at.points.length === 0) {
      [at] = at.children.values();
      name = `${name}.${at.name}`;
    }
    return { ...at, name, children: collapsed(at) };
  });
}

/** A number of a tensor, short and exact enough to compare by eye: "1.234e-5", "0.8125", "–". */
export function statistic(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e4 || size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}
