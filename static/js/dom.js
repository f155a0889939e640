// Small helpers for elements: no framework, nothing clever.

const ICONS = document.querySelector('meta[name="icons"]')?.content ?? "";
const SVG = "http://www.w3.org/2000/svg";

/** Element with properties, attributes (names with a dash, `role`, `for`) and children. */
export function h(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** One icon of the sprite; decoration only, the label is the caller's. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `${ICONS}#${name}`);
  svg.append(use);
  return svg;
}

/** First element of `<template id>`, cloned. */
export function fromTemplate(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

/** Writes texts into `[data-f=name]`; touches the DOM only where the text changed. */
export function fill(root, values) {
  for (const [name, value] of Object.entries(values)) {
    const target = root.querySelector(`[data-f="${name}"]`);
    const text = value === null || value === undefined ? "" : String(value);
    if (target && target.textContent !== text) target.textContent = text;
  }
}

/** Sets a data attribute only when it changes. */
export function setData(element, name, value) {
  if (value === null || value === undefined) delete element.dataset[name];
  else if (element.dataset[name] !== String(value)) element.dataset[name] = value;
}

/** Value of a `json_script` element, or null. */
export function jsonScript(id) {
  const element = document.getElementById(id);
  return element ? JSON.parse(element.textContent) : null;
}

/** A CSS custom property as a computed colour, for canvases. */
export function cssColour(name) {
  const probe = h("span", { hidden: true });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}
