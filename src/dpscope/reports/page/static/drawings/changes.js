// Diverging bars: less than before to the left of zero, more to the right; what cannot be told from chance stays pale.
drawings["changes"] = (data, theme) => {
  const tones = { ...data.tones, none: theme.faint };
  const value = data.unit === "ms" ? format.ms : format.bytes;
  const percent = (share, digits = 1) => `${share < 0 ? "−" : share > 0 ? "+" : ""}${+Math.abs(share * 100).toFixed(digits)}%`;
  const reach = (bar) => Math.max(Math.abs(bar.relative), ...(bar.range ?? []).map(Math.abs));
  // Never less than 5 % to each side, so that noise does not look like a difference.
  const limit = 1.1 * Math.max(0.05, ...data.bars.map(reach));
  const tip = (bar) => [
    `<b>${escapeText(bar.name)}</b>`,
    `${value(bar.before)} → ${value(bar.now)}, ${percent(bar.relative)}`,
    bar.range && `the spreads allow ${bar.range.map((end) => percent(end)).join(" to ")}`,
    bar.ratios && `${escapeText(bar.ratios)} of standard`,
    escapeText(bar.verdict),
  ].filter(Boolean).join("<br>");
  const narrow = theme.width < 600;
  const label = ({ name }) => (narrow ? name.replace("sequence", "seq") : name).replace(" at ", "\n");
  const rows = data.bars.map((bar, place) => place); // two rows may have one name
  return {
    grid: { left: 8, right: 20, top: 8, bottom: 8, containLabel: true },
    tooltip: { trigger: "item", formatter: ({ dataIndex }) => tip(data.bars[dataIndex]) },
    xAxis: {
      type: "value",
      min: -limit,
      max: limit,
      splitNumber: narrow ? 3 : 5,
      axisLabel: { color: theme.faint, hideOverlap: true, showMinLabel: false, showMaxLabel: false, formatter: (share) => percent(share) },
      splitLine: { lineStyle: { color: theme.rule } },
    },
    yAxis: {
      type: "category",
      inverse: true,
      data: rows,
      axisTick: { show: false },
      axisLine: { onZero: true, lineStyle: { color: theme.ink } },
      axisLabel: {
        color: theme.ink,
        interval: 0,
        width: narrow ? 130 : 200,
        overflow: "truncate",
        formatter: (place) => label(data.bars[place]),
      },
    },
    series: [
      {
        type: "bar",
        barMaxWidth: 20,
        data: data.bars.map((bar) => ({ value: bar.relative, itemStyle: { color: tones[bar.tone], opacity: bar.tone === "none" ? 0.35 : 0.85 } })),
        markLine: {
          silent: true,
          symbol: ["none", "none"],
          lineStyle: { color: theme.ink, width: 1.5, type: "solid" },
          data: data.bars.flatMap(({ range }, place) => range ? [[{ coord: [range[0], place] }, { coord: [range[1], place] }]] : []),
        },
      },
    ],
  };
};
drawings["changes"].height = (data) => 60 + 42 * data.bars.length;
