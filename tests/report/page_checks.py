"""What every page is held to, as scripts that return what breaks it."""

from typing import Any

# Text below 4.5 to 1 (WCAG 2.2, 1.4.3), text in charts included.
CONTRAST = """() => {
    const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgb = (colour) => { paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
        return [...paint.getImageData(0, 0, 1, 1).data]; };
    const light = (colour) => { const [r, g, b] = rgb(colour).map((v) => { const x = v / 255;
        return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const behind = (x) => { for (; x; x = x.parentElement) { const colour = getComputedStyle(x).backgroundColor;
        if (rgb(colour)[3] === 255) return colour; } return "white"; };
    const poor = new Set();
    for (const x of document.querySelectorAll("main *, header *")) {
        const own = [...x.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || !x.getClientRects().length || x.closest("noscript")) continue;
        const style = getComputedStyle(x);
        const [a, b] = [light(x instanceof SVGElement ? style.fill : style.color), light(behind(x))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.add(`${x.tagName}.${x.getAttribute("class")} ${ratio.toFixed(2)} ${x.textContent.slice(0, 20)}`);
    }
    return [...poor];
}"""

# Without a name for readers.
UNNAMED = """() => [...document.querySelectorAll("button, input, a, table, [role=region], fieldset, nav")]
        .filter((x) => !(x.getAttribute("aria-label") || x.textContent.trim() || x.labels?.length
            || document.getElementById(x.getAttribute("aria-labelledby"))?.textContent))
        .map((x) => x.outerHTML.slice(0, 100))"""

# Wider than 390 px; tables scroll inside their own box.
OUTSIDE = """() => [...document.querySelectorAll("main *, header *")].filter((x) => {
        const box = x.getBoundingClientRect();
        return box.width && !x.closest(".scroll") && (box.right > 391 || box.left < -1);
    }).map((x) => x.outerHTML.slice(0, 100))"""

# Text below 12 px.
SMALL = """() => [...document.querySelectorAll("main *")].filter((x) => x.getClientRects().length
        && [...x.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())
        && !x.closest("sup, sub, noscript") && parseFloat(getComputedStyle(x).fontSize) < 12)
        .map((x) => x.outerHTML.slice(0, 100))"""

# Labels of a chart that lie on one another.
OVERLAPS = """() => [...document.querySelectorAll("svg[role]")].flatMap((picture) => {
        const texts = [...picture.querySelectorAll("text")].map((x) => [x.textContent, x.getBoundingClientRect()]);
        return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([, q]) =>
            Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
                && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3)
            .map(([b]) => `${picture.id}: ${a} / ${b}`));
    })"""

# Lower than 24 px (WCAG 2.2, 2.5.8).
TARGETS = """() => [...document.querySelectorAll("button, .option, input[type=range], summary")]
        .filter((x) => x.getClientRects().length && x.getBoundingClientRect().height < 24)
        .map((x) => x.outerHTML.slice(0, 100))"""

ON_A_PHONE = (OUTSIDE, SMALL, OVERLAPS, TARGETS)


def walk_by_tab(page: Any, stops: int) -> tuple[list[int], list[str]]:
    """(place in the document of what each press of Tab reaches, what shows no outline of 2 px there)."""
    seen: list[int] = []
    hidden: list[str] = []
    for _ in range(stops):
        page.keyboard.press("Tab")
        where, visible = page.evaluate("""() => {
            const x = document.activeElement;
            const at = [...document.querySelectorAll("*")].indexOf(x);
            const style = getComputedStyle(x.type === "radio" ? x.nextElementSibling : x);
            return [at, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
        }""")
        seen.append(where)
        if not visible:
            hidden.append(page.evaluate("document.activeElement.outerHTML.slice(0, 120)"))
    return seen, hidden
