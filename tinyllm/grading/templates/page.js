"use strict";
// Turns the headers of the tables that can be sorted into buttons; without a script they stay plain headers.
for (const table of document.querySelectorAll("table.sortable")) {
  const said = document.createElement("p");
  said.className = "for-readers";
  said.setAttribute("role", "status");
  table.parentElement.after(said);
  for (const header of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => sort(table, header, said));
  }
}

function sort(table, header, said) {
  const before = header.getAttribute("aria-sort") ?? (header.dataset.first === "descending" ? "ascending" : "descending");
  const order = before === "ascending" ? "descending" : "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const key = (row) => Number(row.cells[header.cellIndex].dataset.key);
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort((one, two) => sign * (key(one) - key(two))));
  said.textContent = `Sorted by ${header.textContent.trim()}, ${order}.`;
}

// A printed page shows everything; afterwards what was closed is closed again.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const one of closed) one.open = true;
});
addEventListener("afterprint", () => {
  for (const one of closed) one.open = false;
});
