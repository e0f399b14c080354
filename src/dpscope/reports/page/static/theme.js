// Light, dark, or as the reader's system has it. On paper always light.

const THEME_KEY = "dpscope-theme";
const root = document.documentElement;
const paper = matchMedia("print"), darkSystem = matchMedia("(prefers-color-scheme: dark)");
const THEMES = darkSystem.matches ? ["auto", "light", "dark"] : ["auto", "dark", "light"]; // the first press is seen

// A page opened from a file may be refused storage: then the choice lasts as long as the page.
function remember(value) {
  try { localStorage.setItem(THEME_KEY, value); } catch { /* not remembered */ }
}

function remembered() {
  try { return localStorage.getItem(THEME_KEY); } catch { return null; }
}

// Colours as page.css has them at this moment, so that a drawing is never in the other theme's ink.
function currentTheme() {
  const style = getComputedStyle(root);
  const names = ["ink", "faint", "rule", "panel", "accent", "paper"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function showTheme(choice) {
  root.dataset.theme = choice;
  document.getElementById("theme").textContent = `Theme: ${choice}`;
}

function setUpTheme(redraw) {
  showTheme(THEMES.includes(remembered()) ? remembered() : "auto");
  document.getElementById("theme").addEventListener("click", () => {
    showTheme(THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length]);
    remember(root.dataset.theme);
    redraw();
  });
  darkSystem.addEventListener("change", redraw);
}
