// A bar for each median with its figure at its end; in the lane below it a point for every step, and a line from the
// 10th to the 90th percentile. So neither covers the other, however far a step lies out.
drawings["step-time"] = (data, theme) => {
  const { bars } = data;
  const narrow = theme.width < 560;
  const costs = (bar) => [format.ms(bar.median_ms) + bar.marks[0], ...(bar.ratio == null ? [] : [format.ratio(bar.ratio) + bar.marks[1]])].join("  ");
  const lane = (index) => index + STEPS_LANE;
  const points = bars.flatMap((bar, index) => bar.steps_ms.map((ms) => ({ value: [ms, lane(index)], bar })));
  // Spreads are lines, each from its own two points.
  const spread = (bar, index) => bar.spread_ms && [{ coord: [bar.spread_ms[0], lane(index)] }, { coord: [bar.spread_ms[1], lane(index)] }];
  const letters = narrow ? 11 : 22;
  const names = widest(bars.map((bar) => shorten(bar.method, letters)), 13) + 12;
  const figures = widest(bars.map(costs), 13) + 16, plot = theme.width - names;
  const reach = Math.max(...bars.map((bar) => Math.max(...bar.steps_ms, ...(bar.spread_ms ?? []), 0))); // of steps, not of figures
  const longest = Math.max(...bars.map((bar) => bar.median_ms));
  // Either the farthest step or the figure of the longest bar is what ends the axis.
  const end = Math.max(1.03 * reach, longest * plot / Math.max(plot - figures, 0.3 * plot)) || 1;
  return {
    grid: { left: names, right: 12, top: 4, bottom: 40, outerBoundsMode: "none" },
    tooltip: {
      trigger: "item",
      formatter: ({ seriesName, data: { bar }, value }) => {
        const name = `<b>${escapeText(bar.method)}</b>`;
        if (seriesName === "steps") return `${name}<br>one step: ${format.ms(value[0])}`;
        const wide = bar.spread_ms ? `<br>10th to 90th percentile: ${bar.spread_ms.map(format.ms).join(" to ")}` : "";
        return `${name}<br>median of ${bar.steps_ms.length || "the"} steps: ${costs(bar)}<br>${bar.per_second.map((rate) => escapeText(rate) + bar.marks[0]).join(", ")}${wide}`;
      },
    },
    xAxis: { ...valueAxis(theme, "ms a step", ticked(0, end, narrow ? 3 : 6)), axisLine: { show: false } },
    yAxis: [
      nameAxis(theme, bars.map((bar) => bar.method), letters, { axisLabel: { color: theme.ink, fontSize: 13, interval: 0, formatter: (name) => shorten(name, letters) } }),
      { type: "value", min: 0, max: bars.length, inverse: true, show: false }, // a band a method, as the names have it
    ],
    series: [
      {
        name: "medians", type: "bar", barWidth: 22, barGap: "0%",
        data: bars.map((bar) => ({ value: bar.median_ms, bar, itemStyle: { color: onTheme(bar.colour, theme) } })),
        label: { show: true, position: "right", distance: 4, padding: [1, 2], backgroundColor: theme.paper, color: theme.ink, fontSize: 13, formatter: ({ data: { bar } }) => costs(bar) },
      },
      { name: "lane", type: "bar", barWidth: 14, silent: true, tooltip: { show: false }, data: [] }, // room for the steps
      {
        name: "steps", type: "scatter", yAxisIndex: 1, symbolSize: 6, data: points, itemStyle: { color: theme.paper, borderColor: theme.ink, borderWidth: 1.2 },
        markLine: {
          silent: true, symbol: "none", label: { show: false },
          lineStyle: { type: "solid", width: 2, color: theme.ink }, data: bars.map(spread).filter(Boolean),
        },
      },
    ],
  };
};

const BAND = 52; // pixels of a method
const STEPS_LANE = 0.5 + 11 / BAND; // of a band: the middle of the lower of two lanes, 22 and 14 pixels high

drawings["step-time"].height = ({ bars }) => 44 + BAND * bars.length;
