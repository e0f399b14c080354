// Bars for medians, a point for every step.
drawings["step-time"] = (data, theme) => ({
  grid: { left: 8, right: 70, top: 8, bottom: 36, containLabel: true },
  tooltip: {
    trigger: "item",
    formatter: ({ name, seriesIndex, value }) => {
      const bar = data.bars.find((candidate) => candidate.method === name);
      if (seriesIndex === 1) return `${escapeText(name)}: one step, ${format.ms(value[0])}`;
      const spread = bar.spread_ms ? `<br>10th to 90th percentile ${bar.spread_ms.map(format.ms).join(" to ")}` : "";
      return `<b>${escapeText(name)}</b><br>median ${format.ms(bar.median_ms)} (${format.ratio(bar.ratio)})${spread}`;
    },
  },
  xAxis: { type: "value", name: "ms", nameLocation: "middle", nameGap: 24 },
  yAxis: { type: "category", inverse: true, data: data.bars.map((bar) => bar.method) },
  series: [
    {
      type: "bar",
      barMaxWidth: 34,
      data: data.bars.map((bar) => ({ value: bar.median_ms, name: bar.method, itemStyle: { color: onTheme(bar.colour, theme), opacity: 0.75 } })),
      label: { show: true, position: "right", color: theme.ink, formatter: ({ dataIndex }) => format.ratio(data.bars[dataIndex].ratio) },
    },
    {
      type: "scatter",
      symbolSize: 5,
      data: data.bars.flatMap((bar) => bar.steps_ms.map((ms) => ({ value: [ms, bar.method], name: bar.method, itemStyle: { color: theme.ink, opacity: 0.6 } }))),
    },
  ],
});
