// Faults of what is shown: names, sizes, references, contrast. An expression whose value is a function.
() => {
    const wrong = [];
    const shown = (e) => e.checkVisibility({visibilityProperty: true});
    for (const e of document.querySelectorAll("button, a[href], input, select, textarea, summary, meter, [role=region]")) {
        if (!shown(e) && e.type !== "file") continue;
        const label = e.ariaLabel || [...(e.labels ?? [])].map((l) => l.textContent).join("") || e.textContent.trim();
        if (!label) wrong.push(`no name: ${e.outerHTML.slice(0, 80)}`);
        const box = e.getBoundingClientRect();
        if (e.matches("button") && shown(e) && Math.min(box.width, box.height) < 24) wrong.push(`small: ${label}`);
    }
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(`twice: ${id}`);
    for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"])
        for (const e of document.querySelectorAll(`[${name}]`))
            if (!document.getElementById(e.getAttribute(name))) wrong.push(`${name} ${e.getAttribute(name)}`);
    for (const e of document.querySelectorAll("[tabindex]")) if (e.tabIndex > 0) wrong.push("tabindex");
    if (document.querySelectorAll("h1").length < 1 || !document.documentElement.lang || !document.title) wrong.push("page");
    if (!document.querySelector("main") || !document.querySelector("[aria-live=polite]")) wrong.push("landmarks");

    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const behind = (e) => {
        for (; e; e = e.parentElement) {
            const color = rgba(getComputedStyle(e).backgroundColor);
            if (color[3] === 255) return color;
        }
        return [255, 255, 255, 255];
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const seen = new Set();
    while (walker.nextNode()) {
        const e = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !shown(e) || seen.has(e) || e.closest(":disabled, .sr, .skip, noscript, option")) continue;
        if (document.querySelector("dialog[open]") && !e.closest("dialog")) continue;
        seen.add(e);
        const [a, b] = [light(rgba(getComputedStyle(e).color)), light(behind(e))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) wrong.push(`contrast ${ratio.toFixed(2)}: ${e.className} ${e.textContent.slice(0, 30)}`);
    }
    return wrong;
}
