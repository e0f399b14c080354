// DRAM bytes of a step: read and written, below families of kernels where those were looked at. Estimates are hatched.
drawings["traffic"] = (data, theme) => {
  const largest = Math.max(...data.bars.map((bar) => bar.bytes));
  const [unit, unitName] = decimalUnit(largest);
  const families = data.parts.some((part) => part.stack === "family");
  const names = data.parts.map((part) => part.label);
  const letters = isNarrow(theme) ? 12 : 28, methods = data.bars.map((bar) => bar.method);
  const ends = data.bars.map((bar) => trafficEnd(bar, isNarrow(theme)));
  const plot = theme.width - widest(methods.map((name) => shorten(name, letters))) - 40;
  const room = largest / unit * (isNarrow(theme) ? 0.16 : 0.07); // that a figure needs
  return {
    grid: { left: 8, right: 16, top: legendHeight(names, theme.width), bottom: 34, containLabel: true },
    legend: legendOf(names, theme),
    tooltip: tooltipOf(theme, (items) => trafficTip(data, items[0].dataIndex), { trigger: "axis", axisPointer: { type: "shadow" } }),
    xAxis: valueAxis(theme, `DRAM bytes of a step (${unitName})`, fromZero([largest / unit], plot / Math.max(plot - 1.1 * widest(ends) - 12, 0.25 * plot), isNarrow(theme) ? 4 : 6)), // ends are bold
    yAxis: nameAxis(theme, methods, letters),
    series: [
      ...data.parts.map((part) => trafficBars(part, data.bars, theme, { unit, room, slim: families && part.stack === "direction" })),
      endLabels(theme, ends, families ? "family" : "direction"),
    ],
  };
};

drawings["traffic"].height = (data, theme) => {
  const each = data.parts.some((part) => part.stack === "family") ? 60 : 46;
  return legendHeight(data.parts.map((part) => part.label), theme.width) + each * data.bars.length + 56;
};

function trafficEnd(bar, narrow) {
  const mark = bar.estimated ? MARKS.estimate : "";
  const ratio = bar.ratio == null ? "" : `  ${mark}${format.ratio(bar.ratio)}`;
  return `${mark}${format.traffic(bar.bytes)}${ratio}${bar.estimated && !narrow ? "  estimate" : ""}`;
}

const decimalUnit = (largest) => [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => largest >= size) ?? [1, "B"];

function trafficBars(part, bars, theme, { unit, room, slim }) {
  // Through a hatch no figure is read: the tooltip and the end of the bar have them.
  const hatched = (bar) => bar.estimated || part.private;
  return {
    type: "bar",
    name: part.label,
    stack: part.stack,
    barWidth: slim ? 8 : 26,
    barGap: "12%",
    itemStyle: { ...segmentLook(part.colour, theme), ...(bars.every(hatched) ? { decal: HATCH } : {}) },
    label: { show: !slim, color: segmentInk(part, theme), fontSize: 11, formatter: ({ value, dataIndex }) => value > room && !hatched(bars[dataIndex]) ? threeDigits(value) : "" },
    data: part.bytes.map((count, place) => ({
      value: count == null ? null : count / unit,
      itemStyle: hatched(bars[place]) ? { decal: HATCH } : {},
    })),
  };
}

function trafficTip(data, place) {
  const bar = data.bars[place], mark = bar.estimated ? MARKS.estimate : "";
  const amount = (count) => count == null ? MARKS.missing : `${mark}${format.traffic(count)}`;
  const families = data.parts
    .filter((part) => part.stack === "family" && part.bytes[place])
    .map((part) => `<br>${escapeText(part.label)}: ${amount(part.bytes[place])} (${Math.round(100 * part.bytes[place] / bar.bytes)}%)`);
  const share = bar.bandwidth_fraction == null ? "" : `, ${mark}${Math.round(100 * bar.bandwidth_fraction)}% of what a large copy reaches here`;
  const rate = bar.bandwidth == null ? "" : `<br>over the unprofiled step ${mark}${format.rate(bar.bandwidth, "B")}${share}`;
  return `<b>${escapeText(bar.method)}</b>${bar.estimated ? ` (${MARKS.estimate} estimate, not measured)` : " (measured)"}`
    + `<br>${amount(bar.bytes)}${bar.ratio == null ? "" : `, ${mark}${format.ratio(bar.ratio)} of standard`}`
    + `<br>read ${amount(bar.read_bytes)}, written ${amount(bar.written_bytes)}`
    + `<br>${amount(bar.per_item_bytes)} a ${escapeText(bar.item)}${rate}${families.join("")}`;
}
