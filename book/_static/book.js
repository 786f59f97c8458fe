// DataTables has a dark look for <html class="dark">; the theme has its own mark, which the reader can switch.
const page = document.documentElement;
const follow = () => page.classList.toggle("dark", page.dataset.theme === "dark");
new MutationObserver(follow).observe(page, { attributeFilter: ["data-theme"] });
follow();
// A screen reader reads a fold's own words, "The answer", and not MyST-NB's "Toggle hidden content" in their place.
document.addEventListener("DOMContentLoaded", () => {
  for (const named of document.querySelectorAll("summary[aria-label], button.search-button-field")) {
    named.removeAttribute("aria-label");
  }
});
