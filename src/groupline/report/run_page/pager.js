// Long lists a page at a time, so that the page stays as quick with 100,000 rows as with 100.
"use strict";

/** Buttons that turn pages of `count` things. show(first, last) fills what they stand for. Returns {node, to, set}. */
function pager({ id, what, size, show }) {
  let [count, at] = [0, 0];
  const said = el("span.said-page", { id: `${id}-page`, "aria-live": "polite" });
  const pages = () => Math.max(1, Math.ceil(count / size));
  const to = (page) => {
    at = Math.min(Math.max(page, 0), pages() - 1);
    const last = Math.min(count, (at + 1) * size);
    said.textContent = count ? `${at * size + 1}–${last} of ${count.toLocaleString("en")} ${what}` : `no ${what}`;
    back.disabled = first.disabled = at === 0;
    next.disabled = end.disabled = at === pages() - 1;
    node.hidden = count <= size && count > 0;
    show(at * size, last);
  };
  const turn = (name, words, where) => el("button.plain", { type: "button", id: `${id}-${name}`, "aria-label": `${words} page of ${what}`, onclick: () => to(where()) }, { first: "⇤", back: "←", next: "→", last: "⇥" }[name]);
  const first = turn("first", "first", () => 0);
  const back = turn("back", "previous", () => at - 1);
  const next = turn("next", "next", () => at + 1);
  const end = turn("last", "last", () => pages() - 1);
  const node = el("div.pager", {}, first, back, said, next, end);
  const set = (total, page = 0) => {
    count = total;
    to(page);
  };
  return { node, to, set, showing: (i) => to(Math.floor(i / size)) };
}

/** A table of many rows, a page at a time. row(i): its cells, the first its head. */
function pagedTable({ id, caption, head, count, row, size = 25, what = "rows" }) {
  const hold = el("div");
  const pages = pager({
    id, what, size,
    show: (from, to) => {
      const rows = [];
      for (let i = from; i < to; i++) rows.push(row(i));
      hold.replaceChildren(table({ id, caption, head, rows }));
    },
  });
  pages.set(count);
  return el("div", {}, hold, pages.node);
}

/** The same, built when it is opened. */
function lazyTable(id, title, head, count, row) {
  const node = el("details.data", {}, el("summary", {}, "Numbers as a table"));
  node.addEventListener("toggle", () => {
    if (node.open && node.children.length === 1) {
      node.append(pagedTable({ id: `${id}-data`, caption: title, head: head.map(plain), count, row }));
    }
  });
  return node;
}

/** Text that may stand where markup is taken. */
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
