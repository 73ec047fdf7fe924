"use strict";
// Asks the shard for status.json once a second, and shows it. Whatever comes from a shard is set as text, never as
// markup.

const PAGE_S = 1, HIDDEN_PAGE_S = 5, HISTORY_S = 5;
const kept = new Map();            // [seconds, count] pairs of the last minute, by what is counted
const element = id => document.getElementById(id);

// Numbers in words.
const bytes = n => n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : n < 1e12 ? `${(n / 1e9).toFixed(1)} GB` : `${(n / 1e12).toFixed(1)} TB`;
const span = s => s < 100 ? `${Math.floor(s)} s` : s < 6000 ? `${Math.floor(s / 60)} min` : s < 360000 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
const number = n => n === null ? "" : n >= 100 ? n.toFixed(0) : n >= 1 ? n.toFixed(1) : n.toFixed(2);
const whole = n => n.toLocaleString("en");
const lag = s => s === null ? "" : s === 0 ? "0 ms" : s < 0.001 ? `${(s * 1000).toFixed(2)} ms` : s < 0.01 ? `${(s * 1000).toFixed(1)} ms` : s < 10 ? `${whole(Math.round(s * 1000))} ms` : span(s);

/** The rate of a counter over the last 5 s, or null, and its rates over the last minute. */
function rate(key, count, now) {
  const past = kept.get(key) || [];
  if (past.length && count < past[past.length - 1][1]) past.length = 0;   // it began anew
  past.push([now, count]);
  while (now - past[0][0] > 60) past.shift();
  kept.set(key, past);
  const from = past.find(p => now - p[0] <= 5.5);
  const last = from && now > from[0] ? (count - from[1]) / (now - from[0]) : null;
  return [last, past.slice(1).map((p, i) => (p[1] - past[i][1]) / Math.max(p[0] - past[i][0], 0.001))];
}

// Elements.

/** An element with children; text is text. */
function made(tag, kind = "", ...children) {
  const found = document.createElement(tag);
  if (kind) found.className = kind;
  found.append(...children);
  return found;
}

/** A link to the page of a parameter or table. */
function link(kind, name) {
  const found = made("a", "", name);
  found.href = `#${kind}/${encodeURIComponent(name)}`;
  return found;
}

/** Makes `old` the same as `fresh`, and leaves alone what is the same: focus and selection stay. */
function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeName !== fresh.nodeName || old.nodeType !== Node.ELEMENT_NODE) { old.replaceWith(fresh); return; }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of [...fresh.attributes]) old.setAttribute(name, value);
  show(old, [...fresh.childNodes]);
}

/** Shows nodes in an element, instead of what it has. */
function show(into, nodes) {
  nodes.forEach((node, index) => { if (into.childNodes[index]) morph(into.childNodes[index], node); else into.append(node); });
  while (into.childNodes.length > nodes.length) into.lastChild.remove();
}

/** A row's cells, each `[contents, class]` or its contents alone, with the labels of their columns for phones. */
function row(labels, cells) {
  return made("tr", "", ...cells.map((each, index) => {
    const [contents, kind] = Array.isArray(each) ? each : [each, ""];
    const cell = made("td", kind);
    if (contents !== "") cell.append(contents);
    cell.dataset.label = labels[index] || "";
    return cell;
  }));
}

/** Fills a table: one row for each of a list, of the cells that `cells_of` makes. */
function rows(id, list, cells_of, none = "none") {
  const body = element(id), headings = [...body.parentElement.tHead.rows[0].cells];
  const labels = headings.map(each => each.textContent.trim());
  const found = list.map(each => row(labels, cells_of(each).map((cell, index) =>
    headings[index].className && !Array.isArray(cell) ? [cell, headings[index].className] : cell)));
  if (!found.length) { const empty = row([""], [[none, "dim"]]); empty.firstChild.colSpan = labels.length; found.push(empty); }
  show(body, found);
}

/** A line without axes of the last minute. */
function line(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 60 16"); svg.setAttribute("preserveAspectRatio", "none"); svg.setAttribute("aria-hidden", "true");
  const top = Math.max(...values, 1e-9), path = document.createElementNS(svg.namespaceURI, "polyline");
  path.setAttribute("points", values.map((v, i) => `${60 - values.length + i},${15 - 14 * v / top}`).join(" "));
  svg.append(path); return svg;
}

/** What workers reported of steps, small. */
function curve(name, figure, points) {
  const known = points.filter(p => p[1] !== null), last = points[points.length - 1];
  const words = `${figure}: ${last[1] === null ? "not finite" : +last[1].toPrecision(4)} at step ${whole(last[0])}`;
  const svg = line([]), low = Math.min(...known.map(p => p[1])), high = Math.max(...known.map(p => p[1]));
  const from = points[0][0], to = last[0];
  svg.setAttribute("viewBox", "0 0 300 80");
  svg.firstChild.setAttribute("points", known.map(p => `${300 * (p[0] - from) / Math.max(to - from, 1)},${78 - 76 * (p[1] - low) / Math.max(high - low, 1e-12)}`).join(" "));
  const range = known.length ? `${+low.toPrecision(3)} to ${+high.toPrecision(3)}, steps ${whole(from)} to ${whole(to)}` : "";
  return made("figure", "", made("figcaption", "", link("parameter", name), `, ${words}`), svg, made("span", "dim", range));
}

/** Who is in the open step, whom it lacks, and how late each was. */
function open_step(each) {
  const box = made("span"), add = (text, kind) => box.append(made("span", kind, text), " ");
  if (each.marked) add("being deleted", "wait");
  if (each.abandoned_for_s !== null) { add(`abandoned: no worker for ${span(each.abandoned_for_s)}`, "dim"); return box; }
  if (each.mode === "async") { add("asynchronous", "dim"); return box; }
  if (!each.ready) add("not initialized, or being restored", "wait");
  if (each.in_step.length) add(`in: ${each.in_step.join(", ")}`, "");
  const missing = [...each.missing, ...(each.lacking ? [each.lacking] : [])];
  if (missing.length) add(`${each.in_step.length ? "missing" : "awaits"}: ${missing.join(", ")}`, each.in_step.length ? "wait" : "dim");
  if (each.crew_words) add(each.crew_words, "dim"); else if (each.done.length) add(`done: ${each.done.join(", ")}`, "dim");
  const gone = each.members.filter(m => m.state === "lost" || m.state === "draining");
  if (gone.length) add(gone.map(m => `${m.worker_id} ${m.state}`).join(", "), "wait");
  if (each.late) add(`late: ${whole(each.late)} chunks, of ${each.members.filter(m => m.late_chunk_count).map(m => m.worker_id).join(", ") || "workers that left"}`, "dim");
  box.append(lags(each.members)); return box;
}

/** Of each worker how late it was in its last step, the latest first. */
function lags(members) {
  const box = made("span", "lags"), late = members.filter(m => m.lag_s !== null), most = Math.max(...late.map(m => m.lag_s), .001);
  if (late.length < 2) return box;
  for (const m of late.slice(0, 8)) {
    const bar = made("meter");
    bar.setAttribute("max", most); bar.setAttribute("value", m.lag_s); bar.setAttribute("aria-hidden", "true");
    box.append(made("span", "", `${m.worker_id} ${lag(m.lag_s)} `, bar));
  }
  if (late.length > 8) box.append(`${late.length - 8} more`);
  return box;
}

// Parts of the page, each from status.json.

/** A link to a section of the runbook; its text is the section's heading. */
function runbook(section) {
  const words = section.replaceAll("-", " "), found = made("a", "", words[0].toUpperCase() + words.slice(1));
  found.href = `runbook.md#:~:text=${encodeURIComponent(`## ${words}`)}`;
  found.target = "_blank";
  return made("p", "dim", "Runbook: ", found);
}

function show_waits(status) {
  const faults = status.shards.filter(s => s.fault), long = status.waits.filter(w => w.open_for_s >= 1);
  const found = [
    ...faults.map(s => [`shard ${s.index}: ${s.state}`, s.fault, s.state === "not let in" ? "not-let-in" : "a-shard-does-not-come-back"]),
    ...status.lost.map(words => [words, "", "a-machine-is-lost"]),
    ...status.troubles.map(words => [words, "", status.sections[words]]),
    ...long.map(w => [w.words, "", "training-does-not-go-on"]),
  ];
  const is_last = (section, place) => section && found[place + 1]?.[2] !== section;   // once under lines of one section
  show(element("waits"), found.length
    ? found.flatMap(([what, why, section], place) => [made("p", "blocker", what), ...(why ? [made("p", "", why)] : []), ...(is_last(section, place) ? [runbook(section)] : [])])
    : [made("p", "", "No worker has waited longer than 1 s.")]);
  element("waits").className = faults.length || status.lost.length ? "lost" : found.length ? "waiting" : "";
}

function show_names(status, now) {
  const rank = each => each.abandoned_for_s !== null ? 2 : each.ready ? 0 : 1;     // who works comes first
  for (const kind of ["parameter", "table"]) {
    const live = status[`${kind}s`].filter(each => !each.ended).sort((a, b) => rank(a) - rank(b));
    rows(`${kind}s`, live, each => {
      const [last, past] = rate(`${kind} ${each.name}`, each.step, now);
      const learning_rate = each.learning_rate ? ` ${+each.learning_rate.toPrecision(4)}` : "";
      return [
        link(kind, each.name), whole(each.elements ?? each.rows), each.optimizer + learning_rate,
        each.fragments.length ? each.versions_words : whole(each.step), number(last), line(past), [open_step(each), "names"],
      ];
    });
  }
  element("table-part").hidden = !status.tables.some(each => !each.ended);
  const ended = ["parameter", "table"].flatMap(kind => status[`${kind}s`].filter(each => each.ended).map(each => [kind, each]));
  element("ended-part").hidden = !ended.length;
  element("ended-count").textContent = ended.length;
  rows("ended", ended, ([kind, each]) => [link(kind, each.name), each.fragments.length ? "family" : kind, whole(each.step), each.optimizer]);
}

function show_workers(status) {
  rows("workers", status.workers, each => {
    const names = made("span");
    each.names.slice(0, 4).forEach(([kind, name], index) => names.append(index ? ", " : "", link(kind, name)));
    if (each.names.length > 4) names.append(`, ${each.names.length - 4} more`);
    return [
      each.worker_id, each.host || ["not known", "dim"], each.pid ? String(each.pid) : "",
      each.connected ? each.software_version || ["not said", "dim"] : ["not connected", "wait"],
      each.transports.length ? each.transports.join(", ") : ["none yet", "dim"], [names, "names"],
      each.behind_steps ? [`${whole(each.behind_steps)} ${each.behind_steps === 1 ? "step" : "steps"}`, "n wait"] : ["0", "n"], lag(each.lag_s), each.idle_s === null ? "" : span(each.idle_s),
    ];
  });
}

function show_shards(status, now) {
  rows("shards", status.shards, s => {
    const found = [String(s.index), s.address, [s.state, s.fault ? "bad" : "good"]];
    if (s.up_s === undefined) return found;
    const of = s.resources, per_s = (key, count) => `${bytes(rate(`${key} ${s.index}`, count, now)[0] || 0)}/s`;
    const busy = of.cpu_s === null ? null : rate(`cpu ${s.index}`, of.cpu_s, now)[0];
    return [...found, s.version, span(s.up_s),
      busy === null ? "" : of.core_count ? `${number(busy)} of ${of.core_count}` : number(busy),
      of.memory_bytes === null ? "" : bytes(of.memory_bytes), bytes(s.stored_bytes),
      of.disk_used_bytes === null ? ["in memory alone", "n dim"] : bytes(of.disk_used_bytes),
      of.disk_free_bytes === null ? "" : `${bytes(of.disk_free_bytes)} of ${bytes(of.disk_size_bytes)}`,
      per_s("in", s.in_bytes), per_s("out", s.out_bytes), String(s.streams)];
  });
}

function show_groups(status) {
  element("group-part").hidden = !status.groups.length;
  rows("groups", status.groups, g => [
    g.name, `${g.size - g.missing_ranks.length} of ${g.size}`,
    [g.missing_ranks.length ? `missing: ${g.missing_ranks.join(", ")}` : g.generation ? "formed" : "forming", g.missing_ranks.length ? "wait" : "good"],
    [g.members.join("; "), "names"],
  ]);
}

function show_learners(status, now) {
  const learners = status.parameters.flatMap(p => p.learners.map(each => ({ family: p.name, ...each })));
  element("learner-part").hidden = !learners.length;
  rows("learners", learners, each => [
    link("parameter", each.family), each.worker_id, whole(each.inner_steps), whole(each.sample_count),
    number(rate(`learner ${each.family} ${each.worker_id}`, each.sample_count, now)[0]), bytes(each.sent_bytes), bytes(each.received_bytes),
    `${number(each.hidden_s)} s`, `${number(each.waited_s)} s`, whole(each.overdue_count), whole(each.kept_count), `${span(each.ago_s)} ago`,
  ]);
}

function show_samples(status) {
  const datasets = status.parameters.filter(p => !p.ended).flatMap(p => p.samples.map(each => ({ of: p, ...each })));
  element("sample-part").hidden = !datasets.length;
  rows("samples", datasets, each => [
    link("parameter", each.of.name), each.name, whole(each.epoch), whole(each.length),
    whole(each.done_count), whole(each.out_count), whole(each.free_count), whole(each.left_out_count), whole(each.partial_count),
  ]);
}

function show_reports(status) {
  const curves = status.parameters.filter(p => !p.ended).flatMap(p => Object.entries(p.reports).map(([figure, points]) => curve(p.name, figure, points)));
  element("report-part").hidden = !curves.length;
  show(element("reports"), curves);
}

/** A list of facts, each a name, what is so, and what part of its limit that is, or null. */
function facts(id, list) {
  show(element(id), list.map(([name, text, part]) => {
    const dd = made("dd", "", text);
    if (part !== null) {
      const bar = made("meter");
      for (const [key, value] of [["max", 1], ["high", .8], ["value", part], ["aria-label", `${name}: ${text}`]]) bar.setAttribute(key, value);
      dd.append(bar);
    }
    return made("div", "", made("dt", "", name), dd);
  }));
}

/** What is used of a limit, with a bar. */
function use([used, most], is_size) {
  const text = is_size ? `${bytes(used)} of ${bytes(most)}` : `${whole(used)} of ${whole(most)}`, bar = made("meter");
  for (const [key, value] of [["max", 1], ["high", .8], ["value", used / most], ["aria-hidden", "true"]]) bar.setAttribute(key, value);
  return made("span", "use", text, bar);
}

function show_settings(status) {
  rows("settings", status.shards.filter(s => s.limits), s => [
    String(s.index), s.durability || "in memory alone", s.checkpoint_ago_s === null ? ["none since it began", "dim"] : `${span(s.checkpoint_ago_s)} ago`,
    ...["stored bytes", "clients", "streams", "shared memory"].map((name, index) => s.limits[name] ? use(s.limits[name], index % 3 === 0) : ""),
  ], "no shard has answered");
  element("ending-part").hidden = !status.endings.length;
  rows("endings", status.endings, each => [
    each.kind, [each.name, "names"], each.left_s <= 0 ? ["has ended", "bad"] : [`in ${span(each.left_s)}`, each.left_s < 86400 ? "bad" : each.left_s < 30 * 86400 ? "wait" : ""], each.shards.join(", "),
  ]);
  element("here-index").textContent = status.here.shard_index;
  element("here").textContent = Object.entries(status.here.refused).map(([what, n]) => `${n} ${what}`).join(", ") || "none";
}

// The page of one parameter, family or table.

/** Kind and name of what the address asks for; null: everything. */
function chosen() {
  const found = /^#(parameter|table)\/(.+)$/.exec(location.hash);
  if (!found) return null;
  try { return { kind: found[1], name: decodeURIComponent(found[2]) }; } catch { return null; }
}

/** What a setting is, in words. */
function in_short(value) {
  if (value === null) return "none";
  if (typeof value !== "object") return String(value);
  if (Array.isArray(value)) return value.map(in_short).join(", ");
  const { kind, ...rest } = value;
  const words = Object.entries(rest).filter(([, each]) => each !== null).map(([name, each]) => `${name} ${in_short(each)}`).join(", ");
  return kind ? `${kind}${words ? `: ${words}` : ""}` : words;
}

function show_one(status) {
  const one = chosen();
  element("one").hidden = !one;
  element("all").hidden = !!one;
  document.title = one ? `${one.name} · Shardwell` : "Shardwell";
  if (!one) return;
  element("one-name").textContent = `${one.kind === "table" ? "Table" : "Parameter"} ${one.name}`;
  const each = status[`${one.kind}s`].find(found => found.name === one.name);
  element("one-none").hidden = !!each;
  element("one-none").textContent = `No shard has a ${one.kind} of this name, or the token may not read it.`;
  if (!each) { show(element("one-facts"), []); rows("one-members", [], () => []); return; }
  const size = each.elements === null ? ["rows", `${whole(each.rows)} of ${each.dim} values`] : ["elements", whole(each.elements)];
  facts("one-facts", [
    ["state", each.ended ? "ended: all workers have left" : open_step(each), null],
    ["step", each.fragments.length ? each.versions_words : whole(each.step), null],
    [...size, null], ["optimizer", `${each.optimizer}${each.learning_rate ? `, learning rate ${+each.learning_rate.toPrecision(4)}` : ""}`, null],
    ...(each.crew ? [["a step is made by", each.crew, null]] : []),
  ]);
  const first = Math.max(0, ...each.members.map(m => m.next_step));
  rows("one-members", each.members, m => [
    m.worker_id, [m.state, m.state === "lost" ? "bad" : m.state === "draining" ? "wait" : ""], whole(m.next_step), whole(first - m.next_step), lag(m.lag_s),
    m.idle_s === null ? "" : span(m.idle_s), whole(m.counted_chunk_count), whole(m.late_chunk_count),
    [m.pid ? `process ${m.pid} on ${m.host}${m.connected ? "" : ", not connected"}` : "", "names"],
  ]);
  const into = element("one-charts"), drawn = Object.entries(each.reports ?? {}).map(([figure, points]) => {
    const title = by_step(figure);
    draw(into, title, points.map(point => point[0]), [{ label: figure, values: points.map(point => point[1]) }], value => String(+value.toPrecision(4)), false);
    return title;
  });
  keep_charts(into, [...TIMED, ...drawn]);
  element("one-quiet").hidden = !!into.children.length;
}

const TIMED = ["steps/s", "wait of a step"];
const by_step = figure => `${figure}, by step`;
let detailed = "";                 // the address whose details are shown

async function look_at_one() {
  const one = chosen(), asked_for = location.hash, into = element("one-charts");
  if (detailed !== asked_for) {
    keep_charts(into, Object.keys(last?.[`${one.kind}s`].find(each => each.name === one.name)?.reports ?? {}).map(by_step));
    for (const id of ["one-steps", "one-tensors", "one-settings"]) show(element(id), []);
    detailed = asked_for;
  }
  if (!last?.[`${one.kind}s`].some(each => each.name === one.name)) return 0;   // show_one() says so
  const query = name => `?kind=${one.kind}&name=${encodeURIComponent(name)}`;
  const found = await ask(`details.json${query(one.name)}`);
  const history = await ask(`history.json${query(found.of)}`);
  if (location.hash !== asked_for) return;
  element("one-shard").textContent = found.shard_index;
  rows("one-steps", found.last_steps, each => [
    whole(each.step), `${span(each.ago_s)} ago`, lag(each.took_s), each.last || "", each.worker_count > 1 ? lag(each.waited_s) : "", String(each.worker_count),
  ]);
  const is_cut = found.tensor_count > found.tensors.length;
  element("one-tensor-count").textContent = is_cut ? `, the first ${whole(found.tensors.length)} of ${whole(found.tensor_count)}` : "";
  rows("one-tensors", found.tensors, each => [
    [each.name, "names"], each.shape.length ? each.shape.join(" x ") : "a number", whole(each.size), [in_short(each.options) || "nothing", "names"],
  ], one.kind === "table" ? "a table has rows" : "it is one vector");
  facts("one-settings", Object.entries(found.settings).map(([name, value]) => [name, in_short(value), null]));
  const seconds = Date.now() / 1000, x = history.ages_s.map(age => seconds - age), of = history.names[0];
  if (of && x.length > 1) {
    draw(into, TIMED[0], x, [{ label: "steps/s", values: of.steps_s }], number);
    draw(into, TIMED[1], x, [{ label: "wait", values: of.wait_s }], lag);
  }
  return x.length;
}

async function look_at_all() {
  if (!last) return 0;             // what has ended is not known yet
  const history = await ask("history.json");
  show_history(history);
  return history.ages_s.length;
}

function show_status(status) {
  const now = performance.now() / 1000;
  element("cluster").textContent = status.cluster;
  show_waits(status);
  show_one(status);
  show_names(status, now);
  show_workers(status);
  show_learners(status, now);
  show_samples(status);
  show_shards(status, now);
  show_groups(status);
  show_reports(status);
  show_settings(status);
}

/** The last hour of the shard that serves the page: what goes fastest, and what the shard uses. */
function show_history(history) {
  const into = element("history"), seconds = Date.now() / 1000, x = history.ages_s.map(age => seconds - age);
  element("history-index").textContent = history.shard_index;
  element("history").hidden = element("history-legend").hidden = x.length < 2;
  element("history-none").hidden = x.length >= 2;
  if (x.length < 2) return;
  const of = history.shard, all = history.names.map(each => ({ label: each.name, values: each.steps_s }));
  const ended = new Set(["parameters", "tables"].flatMap(kind => last?.[kind] ?? []).filter(each => each.ended).flatMap(each => [each.name, ...each.fragments]));
  const names = all.filter(each => !ended.has(each.label) && each.values.some(value => value));      // of what stood still all the time, no line
  const drawn = [];
  const add = (title, lines, shown) => { drawn.push(title); draw(into, title, x, lines, shown); };
  if (names.length) add("steps/s", names, number);
  add("cores busy", [{ label: "cores", values: of.cores }], number);
  add("payload/s", [{ label: "in", values: of.in_bytes_s }, { label: "out", values: of.out_bytes_s }], bytes);
  if (of.memory_bytes.some(each => each !== null)) add("memory", [{ label: "memory", values: of.memory_bytes }], bytes);
  if (of.disk_free_bytes.some(each => each !== null)) add("disk free", [{ label: "disk free", values: of.disk_free_bytes }], bytes);
  keep_charts(into, drawn);
  const left_out = history.left_out ? ` Steps/s are of the ${names.length} names that made most steps; ${whole(history.left_out)} more are left out.` : "";
  element("history-legend").textContent = `A point every ${history.period_s} s, since the shard was started, of an hour at most.${ended.size ? " Names that have ended have no line." : ""}${left_out}`;
}

/** What a path of this port answers, as JSON. */
async function ask(path) {
  const address = new URL(path, location.href);
  address.hash = address.username = address.password = "";   // the browser sends them by itself, and fetch refuses them
  const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(4000) });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

let asked = 0, last = null, back = 0;
async function look() {
  const when = element("when");
  try {
    last = await ask("status.json");
    show_status(last);
    asked = performance.now();
    when.textContent = "live"; when.className = "good";
  } catch (error) {
    if (!asked) { element("waits").className = "lost"; show(element("waits"), [made("p", "", "No shard has answered yet.")]); }
    when.textContent = `no answer for ${span((performance.now() - asked) / 1000)}: ${error.message}`; when.className = "bad";
  }
  setTimeout(look, 1000 * (document.hidden ? HIDDEN_PAGE_S : PAGE_S));
}

async function look_back() {
  let wait_s = HISTORY_S;
  try {
    const sample_count = await (chosen() ? look_at_one() : look_at_all());
    if (sample_count < 2) wait_s = PAGE_S;
  } catch (error) { /* look() says what is wrong */ }
  clearTimeout(back);
  back = setTimeout(look_back, 1000 * (document.hidden ? 4 * wait_s : wait_s));
}

darkness.addEventListener("change", look_back);
addEventListener("hashchange", () => { if (last) show_status(last); scrollTo(0, 0); look_back(); });
look();
look_back();
