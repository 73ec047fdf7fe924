"use strict";
// Charts with axes, by uPlot. A chart is made once and given new numbers from then on; other colours, as when the
// system becomes dark, or other lines make it anew.

const COLOURS = { light: ["#2f6fb0", "#c1571a", "#1a7f37", "#8250df", "#b3261e", "#0a7d8c", "#8a5a00", "#5a6570"],
  dark: ["#6cb0f0", "#f0883e", "#56d364", "#bc8cff", "#ff7b72", "#4fc3d4", "#f2c14e", "#9aa5b0"] };
const CHART_HEIGHT = 170;
const darkness = matchMedia("(prefers-color-scheme: dark)");
const charts = new Map();          // by figure: its plot, and what it was made for
const resized = new ResizeObserver(entries => {
  for (const { target } of entries) {
    const known = charts.get(target), width = inner_width(target);
    if (known && width > 0 && known.plot.width !== width) known.plot.setSize({ width, height: CHART_HEIGHT });
  }
});

function inner_width(figure) {
  const style = getComputedStyle(figure);
  return Math.floor(figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
}

/** What a chart says to readers that see no canvas: of each line the last number and the range. */
function in_words(title, lines, shown) {
  return `${title}: ` + lines.map(({ label, values }) => {
    const known = values.filter(value => value !== null);
    if (!known.length) return `${label} nothing`;
    return `${label} ${shown(known[known.length - 1])} last, ${shown(Math.min(...known))} to ${shown(Math.max(...known))}`;
  }).join("; ");
}

/** Times of day, with seconds where two are closer than a minute. */
function clock(seconds) {
  const is_close = seconds.length > 1 && seconds[1] - seconds[0] < 60;
  const form = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(is_close ? { second: "2-digit" } : {}) };
  return seconds.map(each => new Date(each * 1000).toLocaleTimeString("en", form));
}

/**
 * Draws lines over a common x.
 *
 * `into` holds charts, of which this is the one called `title`; `lines` are `{label, values}`, of which null is
 * nothing; `shown` makes a number a word; `is_time`: x are seconds since 1970, else steps.
 */
function draw(into, title, x, lines, shown, is_time = true) {
  let figure = [...into.children].find(each => each.dataset.title === title);
  if (!figure) {
    figure = document.createElement("figure");
    figure.dataset.title = title;
    figure.setAttribute("role", "img");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    figure.append(caption);
    into.append(figure);
    resized.observe(figure);
  }
  figure.setAttribute("aria-label", in_words(title, lines, shown));
  const made_for = JSON.stringify([darkness.matches, lines.map(each => each.label)]), known = charts.get(figure);
  const data = [x, ...lines.map(each => each.values)];
  if (known && known.made_for === made_for) { known.plot.setData(data); return; }
  if (known) known.plot.destroy();
  const style = getComputedStyle(document.documentElement), dim = style.getPropertyValue("--dim"), rule = style.getPropertyValue("--line");
  const axis = { stroke: dim, font: "11px system-ui", grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1, size: 4 } };
  const colours = COLOURS[darkness.matches ? "dark" : "light"];
  const one = (_, value) => value === null || value === undefined ? "" : shown(value);
  const plot = new uPlot({
    width: Math.max(inner_width(figure), 100), height: CHART_HEIGHT, legend: { show: lines.length > 1 },
    cursor: { y: false }, scales: { x: { time: is_time }, y: { range: (_, low, high) => [Math.min(low ?? 0, 0), (high > 0 ? high : 1) * 1.05] } },
    axes: [{ ...axis, size: 28, space: 60, values: (_, ticks) => is_time ? clock(ticks) : ticks.map(tick => Number.isInteger(tick) ? tick.toLocaleString("en") : "") }, { ...axis, size: 62, values: (_, ticks) => ticks.map(shown) }],
    series: [{ label: is_time ? "time" : "step" }, ...lines.map((each, index) => ({
      label: each.label, stroke: colours[index % colours.length], width: 1.5, value: one, points: { show: each => each.data[0].length < 3 },
    }))],
  }, data, figure);
  charts.set(figure, { plot, made_for });
}

/** Puts the charts of a place in the order of these titles, and takes away all others. */
function keep_charts(into, titles) {
  for (const figure of [...into.children]) {
    if (titles.includes(figure.dataset.title)) continue;
    charts.get(figure)?.plot.destroy();
    charts.delete(figure);
    resized.unobserve(figure);
    figure.remove();
  }
  const there = titles.map(title => [...into.children].find(each => each.dataset.title === title)).filter(each => each);
  there.forEach((figure, place) => { if (into.children[place] !== figure) into.insertBefore(figure, into.children[place]); });
}
