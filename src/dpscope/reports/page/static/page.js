// Sets the page up: the chosen size, the theme, charts that are drawn when they come near, and paper.

// What a screen reader is told when nothing else on the page changes its text.
function announce(text) {
  document.getElementById("live").textContent = text;
}

const drawn = page.charts.map((chart) => new Drawn(chart));
const chooser = document.getElementById("size");
let choice = page.sizes[chooser ? Number(chooser.value) : 0] ?? { setting: "", size: "" };

function choose(index) {
  choice = page.sizes[index] ?? choice;
  for (const story of document.querySelectorAll(".story")) story.hidden = story.dataset.size !== String(index);
  for (const each of drawn) each.show(choice);
  later(drawRest);
}

function redrawAll() {
  for (const each of drawn) each.redraw();
  later(drawRest);
}

// What is far from the window is drawn when there is nothing else to do, one chart at a time.
const later = window.requestIdleCallback ?? ((work) => setTimeout(work, 50));
function drawRest() {
  const next = drawn.find((each) => each.stale && each.view);
  if (!next) return;
  next.draw();
  later(drawRest);
}

setUpTheme(redrawAll);

// The bar has as many lines as its links need: a link leads to just below it.
const bar = document.querySelector(".bar");
new ResizeObserver(() => root.style.setProperty("--bar", `${bar.offsetHeight}px`)).observe(bar);

const nearness = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const each = drawn.find((candidate) => candidate.figure === target);
    each.near = isIntersecting;
    if (isIntersecting) each.draw();
  }
}, { rootMargin: "600px" });
for (const each of drawn) {
  each.show(choice);
  nearness.observe(each.figure);
}
chooser?.addEventListener("change", () => choose(Number(chooser.value)));

let waiting;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    for (const each of drawn) each.resize();
    later(drawRest);
  }, 100);
});

// Paper: everything drawn, in light colours, as wide as a sheet.
function drawForPaper(printing) {
  root.classList.toggle("printing", printing);
  for (const each of drawn) {
    each.reserve();
    each.stale = true;
    if (printing || each.near) each.draw();
  }
}
addEventListener("beforeprint", () => drawForPaper(true));
addEventListener("afterprint", () => drawForPaper(false));
paper.addEventListener("change", ({ matches }) => drawForPaper(matches));

setUpRows();
later(drawRest);
