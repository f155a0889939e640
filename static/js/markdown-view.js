// Draws a growing Markdown text into an element: finished blocks once, the tail again and again.

import "./copy.js";
import DOMPurify from "../vendor/dompurify/purify.es.js";
import { h } from "./dom.js";
import { MarkdownBlocks, toHtml } from "./markdown-blocks.js";

const CLEAN = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** Sanitised nodes of Markdown tokens; code can be copied, and scrolled with the keyboard. */
function nodesOf(tokens) {
  const nodes = DOMPurify.sanitize(toHtml(tokens), CLEAN);
  for (const pre of nodes.querySelectorAll("pre")) {
    const box = h("div", { class: "code" });
    pre.replaceWith(box);
    pre.tabIndex = 0;
    box.append(pre, h("qd-copy", { label: "Copy the code" }));
  }
  return nodes;
}

export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.reset();
  }

  reset() {
    this.blocks = new MarkdownBlocks();
    this.text = "";
    this.tailBox = document.createElement("div");
    this.tailBox.className = "tail";
    this.element.replaceChildren(this.tailBox);
  }

  /** Shows `text`; cheap when it is what was shown before with more behind it. */
  show(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) this.reset();
    const { frozen, tail } = this.blocks.push(text.slice(this.text.length));
    this.text = text;
    if (frozen.length) this.tailBox.before(...nodesOf(frozen).childNodes);
    this.tailBox.replaceChildren(nodesOf(tail));
  }
}
