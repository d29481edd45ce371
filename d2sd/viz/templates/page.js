function reveal() {
  const step = document.getElementById(location.hash.slice(1));
  if (step && step.tagName === "DETAILS") { step.open = true; step.scrollIntoView({block: "start"}); }
}
for (const tree of document.querySelectorAll(".trees .tree")) tree.style.minWidth = `${0.9 * tree.getAttribute("width")}px`;
// A phone shows one tree at first.
if (innerWidth < 600)
  for (const article of document.querySelectorAll("article"))
    [...article.querySelectorAll("details")].slice(1).forEach((step) => (step.open = false));
addEventListener("hashchange", reveal);
for (const link of document.querySelectorAll("a[href^='#']")) link.addEventListener("click", () => setTimeout(reveal));
for (const button of document.querySelectorAll("button[data-show]")) button.addEventListener("click", () => {
  for (const step of button.closest("article").querySelectorAll("details"))
    step.open = button.dataset.show === "all" || step.classList.contains(button.dataset.show);
});
reveal();
