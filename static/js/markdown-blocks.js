// Cuts a growing Markdown text into blocks that cannot change any more and a tail that can. Pure.
// Only the tail is read again when text arrives, so a long answer costs no more than a short one.

import { Lexer, Marked } from "../vendor/marked/marked.esm.js";

const engine = new Marked({ gfm: true, breaks: true });
engine.use({ renderer: { html: ({ text }) => escapeHtml(text), image: ({ href, text }) => link(href, text || href) } });

function escapeHtml(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}

function link(href, text) {
  return `<a href="${escapeHtml(href)}">${escapeHtml(text)}</a>`;
}

/** HTML of tokens, not yet sanitised. */
export function toHtml(tokens) {
  return engine.parser(tokens);
}

export class MarkdownBlocks {
  constructor() {
    this.tail = "";
    this.links = Object.create(null);
  }

  /** Adds text: {frozen, tail} as marked tokens; `frozen` are new since the last call. */
  push(text) {
    this.tail += text;
    const tokens = this._lex(this.tail);
    const keep = frozenCount(tokens);
    const frozen = tokens.slice(0, keep);
    this.tail = this.tail.slice(frozen.reduce((length, token) => length + token.raw.length, 0));
    return { frozen, tail: tokens.slice(keep) };
  }

  _lex(text) {
    const lexer = new Lexer(engine.defaults);
    lexer.tokens.links = this.links;
    return lexer.lex(text);
  }
}

/**
 * How many leading tokens are final. A block is final when a later block has a whole first line: until
 * then "2" may still become "2. item" and belong to the list before it.
 */
function frozenCount(tokens) {
  let final = 0;
  let blockEnd = 0;
  for (const [index, token] of tokens.entries()) {
    if (token.type === "space") continue;
    const hasWholeLine = token.raw.includes("\n") || index < tokens.length - 1;
    if (blockEnd && hasWholeLine) final = blockEnd;
    blockEnd = index + 1;
  }
  return final;
}
