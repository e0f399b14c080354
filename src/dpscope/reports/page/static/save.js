// What a reader takes away: figures as CSV, drawings as SVG and PNG. Made here, sent nowhere.

const SVG = "http://www.w3.org/2000/svg";

function download(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function csvCell(value) {
  if (value == null) return "";
  // A text that a spreadsheet would take for a formula is made plain text: names come from results.
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const toCsv = ({ columns, rows }) => [columns, ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 80);

function svgElement(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

// The drawing alone says neither what it shows nor where: a title above it, on the theme's paper.
function standaloneSvg(drawing, title, subtitle, theme) {
  const inner = drawing.querySelector("svg").cloneNode(true);
  const { width, height } = drawing.querySelector("svg").getBoundingClientRect();
  const margin = 16, top = 56, font = { "font-family": "system-ui, sans-serif", fill: theme.ink };
  const outer = svgElement("svg", { xmlns: SVG, width: width + 2 * margin, height: height + top + margin });
  inner.removeAttribute("style");
  for (const [key, value] of Object.entries({ x: margin, y: top, width, height })) inner.setAttribute(key, value);
  outer.append(
    svgElement("rect", { width: "100%", height: "100%", fill: theme.panel }),
    svgElement("text", { ...font, x: margin, y: 28, "font-size": 17, "font-weight": 600 }, title),
    svgElement("text", { ...font, x: margin, y: 46, "font-size": 12.5, fill: theme.faint }, subtitle),
    inner,
  );
  return outer;
}

const svgText = (svg) => `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(svg)}`;

// At twice the size on the screen, so that it is sharp in a slide.
async function toPng(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(svg))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}
