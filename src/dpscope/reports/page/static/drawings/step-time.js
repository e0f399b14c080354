// Bars for medians, a line from the 10th to the 90th percentile, a point for every step.
drawings["step-time"] = (data, theme) => {
  const { bars } = data;
  const at = (index) => bars[index];
  const narrow = theme.width < 560;
  const reach = (bar) => Math.max(bar.median_ms, ...bar.steps_ms, ...(bar.spread_ms ?? []));
  const costs = (bar) => [format.ms(bar.median_ms) + bar.marks[0], ...(bar.ratio == null ? [] : [format.ratio(bar.ratio) + bar.marks[1]])].join("  ");
  const points = bars.flatMap((bar, index) => bar.steps_ms.map((ms) => ({ value: [ms, index], bar })));
  // Spreads are lines, each from its own two points.
  const spread = (bar, index) => bar.spread_ms && [{ coord: [bar.spread_ms[0], index] }, { coord: [bar.spread_ms[1], index] }];
  return {
    grid: { left: 4, right: widest(bars.map(costs), 13) + 16, top: 4, bottom: 40, containLabel: true },
    tooltip: {
      trigger: "item",
      formatter: ({ seriesName, data: item, dataIndex, value }) => {
        const bar = item.bar ?? at(dataIndex);
        const name = `<b>${escapeText(bar.method)}</b>`;
        if (seriesName === "steps") return `${name}<br>one step: ${format.ms(value[0])}`;
        const wide = bar.spread_ms ? `<br>10th to 90th percentile: ${bar.spread_ms.map(format.ms).join(" to ")}` : "";
        return `${name}<br>median of ${bar.steps_ms.length || "the"} steps: ${costs(bar)}<br>${bar.per_second.map((rate) => escapeText(rate) + bar.marks[0]).join(", ")}${wide}`;
      },
    },
    xAxis: { type: "value", min: 0, name: "ms a step", nameLocation: "middle", nameGap: 26, splitNumber: narrow ? 3 : 6 },
    yAxis: {
      type: "category", inverse: true, data: bars.map((bar) => bar.method), axisTick: { show: false },
      axisLabel: { color: theme.ink, fontSize: 13, width: narrow ? 76 : 150, overflow: "truncate" },
    },
    series: [
      {
        name: "medians", type: "bar", barMaxWidth: 26, barCategoryGap: "45%",
        data: bars.map((bar) => ({ value: bar.median_ms, bar, itemStyle: { color: onTheme(bar.colour, theme), opacity: 0.8 } })),
        markLine: {
          silent: true, symbol: "none", label: { show: false },
          lineStyle: { type: "solid", width: 2, color: theme.ink }, data: bars.map(spread).filter(Boolean),
        },
      },
      { name: "steps", type: "scatter", symbolSize: 6, data: points, itemStyle: { color: theme.paper, borderColor: theme.ink, borderWidth: 1.2 } },
      {
        // Beyond the last step, so that no point lies on a figure.
        name: "costs", type: "scatter", symbolSize: 0, silent: true, itemStyle: { opacity: 1 }, data: bars.map((bar, index) => [reach(bar), index]),
        label: { show: true, position: "right", distance: 9, color: theme.ink, fontSize: 13, formatter: ({ dataIndex }) => costs(at(dataIndex)) },
      },
    ],
  };
};
drawings["step-time"].height = ({ bars }) => 60 + 52 * bars.length;
