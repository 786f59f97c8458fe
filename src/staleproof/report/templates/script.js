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
const contents = document.querySelector(".contents");
const narrow = matchMedia("(max-width: 60rem)");
function unfold() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
  target.scrollIntoView();
  if (narrow.matches) contents.open = false;
}
if (narrow.matches) contents.open = false;
addEventListener("hashchange", unfold);
document.addEventListener("click", (event) => {
  // The same link twice changes no hash.
  if (event.target.closest("a")?.hash === location.hash && location.hash) setTimeout(unfold);
});
unfold();
// A box that scrolls sideways can be reached with the keyboard.
function reach() {
  for (const box of document.querySelectorAll(".wide"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0; else box.removeAttribute("tabindex");
}
document.addEventListener("toggle", reach, true);
addEventListener("resize", reach);
reach();
// The fields above the triage table: rows that hold every word, and what each means for a release.
const filter = document.getElementById("filter"), release = document.getElementById("release");
const known = release.dataset.known.split(" ");
const rows = [...document.querySelectorAll("#triage tbody tr")];
for (const row of rows) row.querySelector(".mark").dataset.all = row.querySelector(".mark").textContent;
function mark() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const holds = (one) => words.every((word) => one.textContent.toLowerCase().includes(word));
  const kept = rows.filter(holds).length;
  const typed = release.value.trim().replace(/^v/, "");
  // "0.18" is the last release of that series.
  const name = known.includes(typed) ? typed : known.filter((one) => one.startsWith(`${typed}.`)).at(-1);
  let affected = 0;
  for (const row of rows) {
    // Words that no row of the table has do not empty it.
    row.hidden = kept > 0 && !holds(row);
    const is = name && row.dataset.releases.split(" ").includes(name), cell = row.querySelector(".mark");
    row.classList.toggle("cured", Boolean(typed && name && !is));
    cell.textContent = !typed ? cell.dataset.all : !name ? "unknown" : is ? `${name}: affected` : `${name}: not affected`;
    cell.className = !typed || !name ? "mark" : is ? "mark bad" : "mark good";
    affected += Boolean(is) && !row.hidden;
  }
  const says = [words.length ? `${kept} symptoms` : "", !typed ? "" : name ? `${affected} affect ${name}`
    : `${typed} is no release we know: ${known[0]} to ${known.at(-1)}`];
  document.getElementById("filtered").textContent = says.filter(Boolean).join(", ");
}
filter.addEventListener("input", mark);
release.addEventListener("input", mark);
// The guided figure: one stage more or less, without the remedy or with it.
const stages = [...document.querySelectorAll("#step .stage")], says = [...document.querySelectorAll("#step .says p")];
const cured = document.getElementById("cured");
let shown = 1;
function step(by) {
  shown = Math.min(Math.max(shown + by, 1), stages.length);
  stages.forEach((one, at) => one.classList.toggle("hidden", at >= shown));
  says.forEach((one, at) => { one.hidden = at !== shown - 1; });
  for (const one of document.querySelectorAll("#step rect")) one.setAttribute("class", cured.checked ? one.dataset.on : one.dataset.off);
  document.getElementById("back").disabled = shown === 1;
  document.getElementById("next").disabled = shown === stages.length;
}
document.getElementById("back").addEventListener("click", () => step(-1));
document.getElementById("next").addEventListener("click", () => step(1));
cured.addEventListener("change", () => step(0));
step(0);
