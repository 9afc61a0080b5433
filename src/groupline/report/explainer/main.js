// Puts the page together: texts, language, and every section's figure.
"use strict";
function show() {
  document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  document.title = t("page.title");
  for (const node of document.querySelectorAll("[data-t]")) node.innerHTML = t(node.dataset.t);
  for (const node of document.querySelectorAll("[data-label]")) node.setAttribute("aria-label", t(node.dataset.label));
  for (const node of document.querySelectorAll("[data-language]")) {
    node.setAttribute("aria-pressed", String(node.dataset.language === language));
  }
  for (const { id, state, mount } of sections) {
    const root = document.querySelector(`#${id} .figure`);
    root.replaceChildren();
    mount(root, state);
  }
}

for (const node of document.querySelectorAll("[data-language]")) {
  node.addEventListener("click", () => {
    language = node.dataset.language;
    show();
  });
}

show();
