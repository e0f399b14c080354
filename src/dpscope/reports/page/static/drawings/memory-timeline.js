// A panel a method, components as stacked areas, on one scale; a strip above each shows the phases.
const PANEL = { title: 58, line: 14, plot: 150, axis: 30, gap: 16, left: 54, right: 20 };
const HEADROOM = 1.2, STRIP = 1.13; // times the highest peak: the panel's top, and where the strip of phases begins

const timelineNames = (data) => data.components.filter((_, n) => data.panels.some((panel) => {
  let level = 0;
  return panel.levels[n].some((change) => (level += change) >= TRIFLE * data.highest);
}));
const timelineTop = (data, width) => legendHeight(timelineNames(data).map(({ label }) => label), width) + phaseLegendHeight(data, width) + 6;

// Each phase of a step once, with its colour: not every stretch is long enough for its name.
const phasesOf = (data) => [...new Map(data.panels.flatMap((panel) => panel.phases).map(([name, , , colour]) => [name, colour]))];
const PHASES_TITLE = "phases, in the strip above each panel:";
const titleAside = (width) => width >= 760 ? textWidth(PHASES_TITLE) + 12 : 0; // else above them
const phaseLegendHeight = (data, width) => legendHeight(phasesOf(data).map(([name]) => name), width - titleAside(width)) + (titleAside(width) ? 0 : 18);

function phaseLegend(data, theme) {
  const { width } = theme, aside = titleAside(width), top = legendHeight(timelineNames(data).map(({ label }) => label), width);
  const phases = phasesOf(data);
  return {
    title: { text: PHASES_TITLE, left: 0, top: top + 3, padding: 0, textStyle: { color: theme.faint, fontSize: 12, fontWeight: "normal" } },
    legend: { ...legendOf(phases.map(([name, colour]) => ({ name: `${PHASE}${name}`, itemStyle: { color: onTheme(colour, theme), opacity: 1 } })), theme), left: aside, top: top + (aside ? 0 : 18), itemHeight: 5, selectedMode: false, formatter: (name) => shorten(name.slice(PHASE.length), LONGEST_NAME) },
    // A legend names series: these have no data.
    series: phases.map(([name, colour]) => ({ type: "scatter", name: `${PHASE}${name}`, silent: true, color: onTheme(colour, theme), data: [] })),
  };
}
const PHASE = "phase: "; // a component may have a phase's name

const timelineColumns = (data, width) => width >= 760 && data.panels.length > 1 ? 2 : 1;

drawings["memory-timeline"] = (data, theme) => {
  const { width } = theme;
  const columns = timelineColumns(data, width);
  const panels = data.panels.map((panel, place) => laidOut(data, unpacked(panel), place, columns, width));
  const phases = phaseLegend(data, theme);
  return {
    title: [...panels.map((panel) => timelineTitle(panel, theme)), phases.title],
    grid: panels.map(({ box }) => ({ left: box.left, top: box.top, width: box.width, height: PANEL.plot, outerBoundsMode: "none" })),
    legend: [legendOf(timelineNames(data).map((component) => ({ name: component.label, itemStyle: fillOf(component, theme) })), theme), phases.legend],
    tooltip: { ...tooltipOn(theme, width), trigger: "axis", axisPointer: { type: "line", snap: true }, formatter: (found) => momentInWords(data, panels, found[0], theme) },
    xAxis: panels.map(({ panel }, gridIndex) => ({
      gridIndex, type: "value", min: panel.events[0], max: panel.events.at(-1), splitLine: { show: false },
      axisLine: { lineStyle: { color: theme.rule } }, axisTick: { lineStyle: { color: theme.rule } },
      axisLabel: { color: theme.faint, hideOverlap: true, showMaxLabel: false, formatter: (event) => Math.round(event).toLocaleString("en") },
    })),
    yAxis: panels.map((_, gridIndex) => ({
      gridIndex, type: "value", min: 0, max: HEADROOM * data.highest / data.unit.size || 1,
      axisLabel: { color: theme.faint, showMaxLabel: false, formatter: (value) => `${value} ${data.unit.name}` },
      splitLine: { lineStyle: { color: theme.rule }, showMaxLine: false },
    })),
    // In parts of a step: each panel is zoomed into the same part of its own.
    dataZoom: [
      { type: "inside", xAxisIndex: panels.map((_, n) => n), filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, preventDefaultMouseMove: false },
      {
        type: "slider", xAxisIndex: panels.map((_, n) => n), filterMode: "none", bottom: 22, height: 16, left: PANEL.left, right: PANEL.right,
        showDataShadow: false, showDetail: false, brushSelect: false, borderColor: theme.rule, backgroundColor: "transparent",
        fillerColor: theme.rule, handleStyle: { color: theme.panel, borderColor: theme.faint }, moveHandleStyle: { color: theme.faint },
      },
    ],
    graphic: [{ type: "text", bottom: 2, left: "center", style: { text: "allocations and frees within the step, in order", fill: theme.faint, fontSize: 12, fontFamily: "system-ui, sans-serif" }, silent: true }],
    series: [...panels.flatMap((panel, place) => panelSeries(data, panel, place, theme)), ...phases.series],
  };
};

drawings["memory-timeline"].zooms = true;
drawings["memory-timeline"].height = (data, { width }) => {
  const lines = Math.ceil(data.panels.length / timelineColumns(data, width));
  return timelineTop(data, width) + lines * (titleHeight(data, width) + PANEL.plot + PANEL.axis + PANEL.gap) + 40;
};

// Changes from one event to the next -> the events and levels themselves.
function unpacked(panel) {
  const sums = (changes) => { let sum = 0; return changes.map((change) => (sum += change)); };
  const events = sums(panel.events), levels = panel.levels.map(sums);
  return { ...panel, events, levels, totals: events.map((_, n) => levels.reduce((sum, level) => sum + (level[n] ?? 0), 0)) };
}

function laidOut(data, panel, place, columns, width) {
  const column = place % columns, line = Math.floor(place / columns);
  const whole = width / columns;
  const box = {
    left: column * whole + PANEL.left,
    width: whole - PANEL.left - PANEL.right,
    top: timelineTop(data, width) + line * (titleHeight(data, width) + PANEL.plot + PANEL.axis + PANEL.gap) + titleHeight(data, width),
  };
  return { panel, box: { ...box, title: box.top - titleHeight(data, width) }, named: namesThatFit(panel, box.width) };
}

// The longest phases whose names do not run into each other above the strip; the others are named by the tooltip.
function namesThatFit(panel, width) {
  const first = panel.events[0], scale = width / (panel.events.at(-1) - first || 1);
  const taken = [], named = new Set();
  const byLength = panel.phases.map(([name, start, end], n) => ({ n, name, start, end })).sort((a, b) => (b.end - b.start) - (a.end - a.start));
  for (const { n, name, start, end } of byLength) {
    const middle = ((start + end) / 2 - first) * scale, half = textWidth(name, 11) / 2 + 3;
    const free = taken.every(([from, to]) => middle + half <= from || middle - half >= to);
    if (!free || middle - half < -PANEL.left || middle + half > width + PANEL.right) continue;
    taken.push([middle - half, middle + half]);
    named.add(n);
  }
  return named;
}

// What a panel says of its peak, whole: in two lines where one is too short.
const peakOf = (panel) => `peak ${format.bytes(panel.peak.bytes)}${panel.maker ? ` in ${panel.maker}` : ""}`;
const peakLines = (panel, room) => Math.min(Math.ceil(textWidth(peakOf(panel), 12) / (0.95 * room)), 3);
const titleHeight = (data, width) => PANEL.title + PANEL.line * (Math.max(...data.panels.map((panel) => peakLines(panel, width / timelineColumns(data, width) - PANEL.right))) - 1);

function timelineTitle({ panel, box }, theme) {
  const room = box.width + PANEL.left;
  return {
    text: shortenTo(panel.method, 0.9 * room, 13), subtext: peakOf(panel), // bold is wider
    left: box.left - PANEL.left, top: box.title, padding: [0, 4], itemGap: 2,
    textStyle: { color: theme.ink, fontSize: 13, fontWeight: "bold" }, subtextStyle: { color: theme.faint, fontSize: 12, width: room, overflow: "breakAll", lineHeight: PANEL.line, height: 3 * PANEL.line, lineOverflow: "truncate" },
  };
}

function panelSeries(data, { panel, named }, place, theme) {
  const { unit, highest } = data;
  const common = { type: "line", xAxisIndex: place, yAxisIndex: place, step: "end", symbol: "none", silent: true, emphasis: { disabled: true } };
  const areas = data.components.map((component, n) => ({
    ...common, name: component.label, stack: `panel ${place}`, lineStyle: { width: 0 }, itemStyle: fillOf(component, theme),
    areaStyle: { ...fillOf(component, theme), opacity: 1 },
    data: panel.levels[n].map((bytes, moment) => [panel.events[moment], bytes / unit.size]),
  })).filter((series) => series.data.length);
  const edges = [...new Set(panel.phases.flatMap(([, start, end]) => [start, end]))];
  const outline = {
    ...common, name: "total", lineStyle: { width: 0.8, color: theme.ink },
    data: panel.totals.map((bytes, moment) => [panel.events[moment], bytes / unit.size]),
    markPoint: { symbol: "triangle", symbolRotate: 180, symbolSize: [9, 7], symbolOffset: [0, "-60%"], itemStyle: { color: theme.ink }, label: { show: false }, data: [{ coord: [panel.peak.event, panel.peak.bytes / unit.size] }] },
    markLine: { symbol: "none", label: { show: false }, lineStyle: { color: theme.faint, width: 0.6, type: [4, 3] }, data: edges.map((event) => ({ xAxis: event })) },
    markArea: {
      data: panel.phases.map(([name, start, end, colour], n) => [
        {
          coord: [start, STRIP * highest / unit.size], itemStyle: { color: onTheme(colour, theme), opacity: 1 },
          label: { show: named.has(n), formatter: () => name, position: "top", distance: 2, color: theme.ink, fontSize: 11 },
        },
        { coord: [end, HEADROOM * highest / unit.size] },
      ]),
    },
  };
  return [...areas, outline];
}

// As Timeline.phase_at: the innermost, an event on a border is the later phase's, the last is in the one that it ends.
function phaseAt(panel, event) {
  const inside = panel.phases.filter(([, start, end]) => start <= event && (event < end || end === panel.events.at(-1)));
  return inside.length ? inside.reduce((best, phase) => phase[2] - phase[1] < best[2] - best[1] ? phase : best)[0] : "between phases";
}

function momentInWords(data, panels, { axisIndex, dataIndex }, theme) {
  const { panel } = panels[axisIndex];
  const event = panel.events[dataIndex];
  const held = data.components
    .map((component, n) => [component, panel.levels[n][dataIndex] ?? 0])
    .filter(([, bytes]) => bytes)
    .reverse() // as they are stacked
    .map(([component, bytes]) => [swatch(onTheme(component.colour, theme)) + escapeText(component.name), format.bytes(bytes)]);
  const head = `<b>${escapeText(shorten(panel.method, LONGEST_NAME))}</b><br>${escapeText(shorten(phaseAt(panel, event), LONGEST_NAME))}, event ${event.toLocaleString("en")}`;
  return head + tooltipTable([...held, ["<b>total</b>", `<b>${format.bytes(panel.totals[dataIndex])}</b>`]]);
}
