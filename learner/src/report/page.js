"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const list = document.getElementById("list");
const view = document.getElementById("episode");

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

function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

function tokens(episode) {
  const box = element("div", { className: "tokens" });
  let run = null;
  for (const [text, id, logp] of episode.tokens) {
    if (logp === null) {
      if (run === null) box.append((run = element("span", { className: "external" })));
      run.append(text);
    } else {
      run = null;
      const token = element("span", { className: "sampled", title: `id ${id}, log-probability ${logp.toFixed(4)}` }, text);
      token.style.background = colour(logp);
      box.append(token);
    }
  }
  return box;
}

function table(className, rows) {
  return element("table", { className }, ...rows.map((row) => element("tr", {}, ...row.map((cell, at) =>
    element(at === 0 ? "th" : "td", {}, cell)))));
}

function show(index) {
  for (const [at, button] of [...list.children].entries()) {
    if (at === index) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
  }
  const episode = data.episodes[index];
  const row = episode.evidence;
  const worth = [["training reward", String(row.training_reward)], ["advantage", shown(row.advantage ?? null)], ["end", row.end],
    ["score", shown(row.score)], ["reward components", shown(row.reward_components)]];
  const calls = (row.trace || []).map((call) => [`${call.turn}.${call.call}`, element("span", { className: call.kind === "Ok" ? "" : "bad" },
    call.kind), call.tool, element("pre", {}, call.arguments), element("pre", {}, call.observation), (call.milestones || []).join(", ")]);
  view.replaceChildren(
    element("h3", {}, `${row.task_id}, step ${row.optimizer_step}, generation ${row.lease.generation}`),
    ...episode.images.map((digest) => element("img", { src: data.images[digest], alt: `image ${digest.slice(0, 12)}` })),
    episode.tokens.length ? tokens(episode) : element("p", {}, "Its tokens are not in the journal."),
    element("p", { className: "legend" }, "probability ", ...[0.01, 0.25, 0.5, 0.75, 1].map((p) => {
      const sample = element("span", {}, String(p));
      sample.style.background = colour(Math.log(p));
      return sample;
    })),
    element("h4", {}, "Tool calls as the recorder wrote them"),
    calls.length ? table("trace", [["turn", "kind", "tool", "arguments", "observation", "milestones"], ...calls]) : element("p", {}, "None."),
    element("h4", {}, "What it was worth"),
    table("trace", worth.map(([name, value]) => [name, element("pre", {}, value ?? "-")])),
    element("p", {}, `episode ${row.episode}`),
  );
}

if (list) {
  data.episodes.forEach((episode, index) => {
    const row = episode.evidence;
    const text = `${row.split === "eval" ? "held-out, " : ""}step ${row.optimizer_step} · ${row.task_id} · ${row.training_reward}`;
    list.append(element("button", { onclick: () => show(index) }, text));
  });
  if (data.episodes.length) show(0);
}
