function reveal() {
  const step = document.getElementById(location.hash.slice(1));
  if (step && step.tagName === "DETAILS") { step.open = true; step.scrollIntoView({block: "start"}); }
}
addEventListener("hashchange", reveal);
for (const link of document.querySelectorAll("a[href^='#']")) link.addEventListener("click", () => setTimeout(reveal));
for (const button of document.querySelectorAll("button[data-show]")) button.addEventListener("click", () => {
  for (const step of button.closest("article").querySelectorAll("details"))
    step.open = button.dataset.show === "all" || step.classList.contains(button.dataset.show);
});
reveal();
