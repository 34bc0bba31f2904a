"use strict";
// Everything that comes from a run is put in as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
let current = 0;

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties || {});
  made.append(...children.filter((child) => child !== null));
  return made;
}

// From orange (surprising) to blue-green (certain), over probabilities.
function colour(logp) {
  const p = Math.exp(Math.max(logp, -12));
  return `hsl(${20 + 150 * p} 75% ${72 + 16 * p}%)`;
}

const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const list = (value) => (Array.isArray(value) ? value.filter((it) => it !== null && typeof it === "object") : []);
const short = (number) => (typeof number === "number" ? String(Math.round(number * 1e4) / 1e4) : "-");

function tokens(turns) {
  return turns.map((turn, index) => {
    const box = element("div", { className: "tokens" });
    const sum = turn.tokens.reduce((sum, token) => sum + token[2], 0);
    const mean = turn.tokens.length ? `, log-probability ${short(sum / turn.tokens.length)} an id` : "";
    box.append(element("h5", {}, `Turn ${index + 1}: ${turn.ids} ids shown, ${turn.tokens.length} sampled${mean}`));
    box.append(element("span", { className: "external" }, turn.shown));
    for (const [text, id, logp] of turn.tokens) {
      const title = `id ${id}, log-probability ${logp.toFixed(4)}`;
      const token = element("span", { className: "sampled", title }, text);
      token.style.background = colour(logp);
      box.append(token);
    }
    return box;
  });
}

function table(className, rows) {
  return element("table", { className }, ...rows.map((row) => element("tr", {}, ...row.map((cell, column) =>
    element(column === 0 ? "th" : "td", {}, cell)))));
}

const pre = (value) => element("pre", {}, shown(value ?? "-"));

function title(episode) {
  const row = episode.row;
  const run = data.runs > 1 ? `${episode.run}: ` : "";
  if (row.round !== undefined) return `${run}round ${row.round}, ${row.name}, ${row.code}, ${short(row.reward)}`;
  const held = row.split === "eval" ? "held-out, " : "";
  return `${run}${held}step ${row.optimizer_step}, ${row.task_id}, ${row.end}, ${short(row.training_reward)}`;
}

function played(episode) {
  const row = episode.row;
  const worth = [["training reward", row.training_reward], ["components", row.reward_components], ["advantage", row.advantage],
    ["end", row.end], ["score", row.score], ["sampling evidence", row.sampling], ["policy", row.policy_version],
    ["seed", row.episode_seed], ["lease", row.lease]];
  const calls = list(row.trace).map((call) => [`${call.turn}.${call.call}`, element("span", { className: ["Ok", "Answer"].includes(call.kind) ? "" : "bad" },
    String(call.kind)), String(call.tool), pre(call.arguments), pre(call.observation), [].concat(call.milestones ?? []).join(", "), call.done ? "done" : ""]);
  const names = ["turn.call", "kind", "tool", "arguments", "observation", "milestones", ""];
  const text = list(row.messages).map((message) => element("div", { className: "tokens" }, element("h5", {}, String(message.role)), shown(message.content)));
  return [
    ...(episode.turns.length ? tokens(episode.turns) : [element("p", {}, "Its tokens are not in the journal; this is its text."), ...text]),
    element("h4", {}, "Tool calls, as the recorder wrote them"),
    calls.length ? table("trace", [names, ...calls]) : element("p", {}, "None."),
    element("h4", {}, "Reward"),
    table("trace", worth.map(([name, value]) => [name, pre(value)])),
    element("p", {}, `Episode ${row.episode}`),
  ];
}

function show(index) {
  if (!data.episodes.length) return;
  current = Math.max(0, Math.min(index, data.episodes.length - 1));
  for (const [place, button] of [...at("list").children].entries()) {
    if (place !== current) button.removeAttribute("aria-current");
    else {
      button.setAttribute("aria-current", "true");
      at("list").scrollTop = button.offsetTop - at("list").offsetTop - 100;
    }
  }
  const episode = data.episodes[current];
  const images = episode.images.map((digest) => element("img", { src: data.images[digest], alt: `image ${digest.slice(0, 12)}` }));
  const row = episode.row;
  const rest = row.round === undefined ? played(episode) : [table("trace", Object.entries(row).map(([name, value]) => [name, pre(value)]))];
  at("episode").replaceChildren(element("h3", {}, title(episode)), ...images, ...rest);
}

function find(text) {
  for (const button of at("list").children) {
    button.hidden = !button.textContent.toLowerCase().includes(text.trim().toLowerCase());
  }
}

function step(by) {
  const buttons = [...at("list").children];
  let index = current + by;
  while (buttons[index] && buttons[index].hidden) index += by;
  if (buttons[index]) location.hash = `episode-${index + 1}`;
}

// #episode-N shows the N-th episode of the page.
function follow() {
  const wanted = /^#episode-(\d+)$/.exec(location.hash);
  if (wanted) {
    show(Number(wanted[1]) - 1);
    at("episodes").scrollIntoView();
  }
}

if (at("list")) {
  data.episodes.forEach((episode, index) => at("list").append(
    element("button", { type: "button", onclick: () => { location.hash = `episode-${index + 1}`; } }, title(episode))));
  at("find").addEventListener("input", (event) => find(event.target.value));
  at("previous").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  for (const mode of document.getElementsByName("mode")) {
    mode.addEventListener("change", () => at("episode").classList.toggle("by-mask", mode.value === "mask"));
  }
  at("legend").append("probability ", ...[0.01, 0.25, 0.5, 0.75, 1].map((p) => {
    const sample = element("span", {}, String(p));
    sample.style.background = colour(Math.log(p));
    return sample;
  }));
  show(0);
  addEventListener("hashchange", follow);
  follow();
}
