// Sets the page up: draws every chart, and gives it its buttons.

const page = JSON.parse(document.getElementById("data").textContent);

function currentTheme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ink: colour("ink"), faint: colour("faint"), rule: colour("rule"), panel: colour("panel"), accent: colour("accent") };
}

class Drawn {
  constructor(chart) {
    this.chart = chart;
    this.figure = document.getElementById(chart.key);
    this.view = chart.views[0];
    this.instance = echarts.init(this.figure.querySelector(".drawing"), null, { renderer: "svg" });
    for (const button of this.figure.querySelectorAll("[data-save]"))
      button.addEventListener("click", () => this.save(button.dataset.save));
    this.draw();
  }

  draw() {
    const place = this.instance.getDom();
    const theme = { ...currentTheme(), width: place.clientWidth };
    const text = { color: theme.ink, fontFamily: "system-ui, sans-serif" };
    const draw = drawings[this.chart.kind];
    place.style.height = draw.height ? `${draw.height(this.view.data, theme)}px` : "";
    this.instance.resize();
    const option = draw(this.view.data, theme);
    this.instance.setOption({ animation: false, textStyle: text, aria: { enabled: true, label: { description: this.view.says } }, ...option }, true);
  }
}

const drawn = page.charts.map((chart) => new Drawn(chart));
addEventListener("resize", () => drawn.forEach((each) => each.draw()));
