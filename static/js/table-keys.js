// j and k (or arrows) walk the rows of a table, Enter opens the row. Rows take part by tabindex.

function rowsOf(table) {
  return [...table.querySelectorAll("tbody tr[tabindex]")];
}

function move(step) {
  const row = document.activeElement.closest?.("table.data tbody tr[tabindex]");
  const table = row?.closest("table") ?? document.querySelector("main table.data");
  if (!table) return;
  const rows = rowsOf(table);
  const next = row ? rows[rows.indexOf(row) + step] : rows[0];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

/** Wires the keys for all tables of the page. */
export function startTableKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, dialog[open]")) return;
    const inTable = event.target.closest("table.data") !== null;
    if (event.key === "j" || (inTable && event.key === "ArrowDown")) move(1);
    else if (event.key === "k" || (inTable && event.key === "ArrowUp")) move(-1);
    else if (event.key === "Enter" && event.target.matches("table.data tr[tabindex]")) event.target.click();
    else return;
    event.preventDefault();
  });
}
