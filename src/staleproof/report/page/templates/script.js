"use strict";
// On a phone a row of a table becomes a block: each cell needs the name of its column.
for (const table of document.querySelectorAll("table")) {
  const names = [...table.querySelectorAll("thead th, thead td")].map((one) => one.textContent);
  if (names.length < 3 || [...table.querySelectorAll("[colspan]")].length) continue;
  table.classList.add("stack");
  for (const row of table.tBodies[0].rows)
    [...row.cells].forEach((one, at) => { if (one.tagName === "TD") one.dataset.label = names[at] ?? ""; });
}
// A link leads to its target even if that lies in a fold.
function unfold() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
  target.scrollIntoView();
  if (narrow.matches) contents.open = false;
}
const contents = document.querySelector(".contents");
const narrow = matchMedia("(max-width: 60rem)");
if (narrow.matches) contents.open = false;
addEventListener("hashchange", unfold);
document.addEventListener("click", (event) => {
  // The same link twice changes no hash.
  if (event.target.closest("a")?.hash === location.hash && location.hash) setTimeout(unfold);
});
unfold();
// Paper has no folds.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((one) => (one.open = true));
});
addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));
// A box that scrolls sideways can be reached with the keyboard.
function reach() {
  for (const box of document.querySelectorAll(".wide"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0; else box.removeAttribute("tabindex");
}
document.addEventListener("toggle", reach, true);
addEventListener("resize", reach);
reach();
// The filter keeps entries of the contents, and rows of the triage table, that hold every word.
const filter = document.getElementById("filter");
const rows = [...document.querySelectorAll("#triage tbody tr")];
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const holds = (one) => words.every((word) => one.textContent.toLowerCase().includes(word));
  let left = 0;
  for (const entry of document.querySelectorAll(".contents > ul > li")) {
    const below = [...entry.querySelectorAll("li")];
    const whole = holds(entry.querySelector("a"));
    for (const one of below) one.hidden = !(whole || holds(one));
    entry.hidden = !(whole || below.some((one) => !one.hidden));
    left += !entry.hidden;
  }
  const kept = rows.filter(holds).length;
  // Words that no row of the table has do not empty it.
  rows.forEach((row) => (row.hidden = kept > 0 && !holds(row)));
  document.getElementById("filtered").textContent = words.length ? `${left} entries, ${kept} symptoms` : "";
});
