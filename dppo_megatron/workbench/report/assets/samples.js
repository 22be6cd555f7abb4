// The sample browser: a step, a group of it side by side, and why each completion was kept or not.
const browser = { run: 0, step: null, group: 0, paint: "surprisal", wanted: "", cache: new Map() };
const element = (name) => JSON.parse(document.getElementById(name)?.textContent || "null");
function index(run) { return cached(`samples-${run}`) || { steps: [], tokens: {}, groups_in_step: {}, note: "No samples." }; }
function cached(name) { if (!browser.cache.has(name)) browser.cache.set(name, element(name)); return browser.cache.get(name); }
const groupsOf = (run, step) => cached(`samples-${run}-${step}`) || [];

/** Why a completion was kept or not, in words. */
function reason(group, member) {
  const p = percent(member.completion_prob), kept = member.kept;
  return { certain: kept ? "Kept with certainty." : "Left out.", score: kept ? `Kept by the draw: its score gave it ${p}.` : `Dropped by the draw: its score gave it ${p}.`,
    floor: kept ? `Kept by the draw at the floor of ${p}.` : `Dropped by the draw at the floor of ${p}.`, rank: "Dropped by a fixed rule: its probability was 0.", "zero advantage": "Zero advantage: it has no gradient.",
    group: "Its whole group was dropped.", overlong: "Truncated, and truncated completions are filtered.", failed: "Its grading failed.", missing: "It was not sampled to its end.", "stopped early": "It was stopped at the limit drawn for it; the weights of others make up for it." }[member.why] || member.why;
}

function pieces(member, tokens) { return member.token_ids && Object.keys(tokens).length ? member.token_ids.map((id) => tokens[id] ?? "") : null; }

/** 0 to 1 for each token, by the chosen colouring; null without one, or if the run has not recorded it. */
function heat(member) {
  if (browser.paint === "surprisal") return member.logprobs && member.logprobs.map((value) => Math.min(1, -value / 4));
  if (browser.paint === "difference") return member.logprobs && member.actor_logprobs && member.logprobs.map((value, at) => Math.min(1, Math.abs(value - member.actor_logprobs[at]) / .5));
  return null;
}

function textOf(member, tokens) {
  const parts = pieces(member, tokens), values = parts && heat(member), box = make("div", { class: "text", tabindex: "0", role: "group", "aria-label": "Completion" });
  if (browser.wanted) { box.append(...marked(member.text)); return box; }
  if (!parts || !values) { box.append(member.text || "(empty)"); return box; }
  const ink = state.theme === "dark" ? "255,143,134" : "214,69,51";
  box.append(...parts.map((text, at) => {
    const actor = member.actor_logprobs ? `; actor ${number(member.actor_logprobs[at])}` : "";
    return make("span", { style: values[at] > .02 ? `background: rgba(${ink},${(.75 * values[at]).toFixed(2)})` : null, title: `p = ${number(Math.exp(member.logprobs[at]))}; log p = ${number(member.logprobs[at])}${actor}` }, text);
  }));
  return box;
}
function marked(text) {
  const found = [], small = text.toLowerCase(), wanted = browser.wanted.toLowerCase();
  let from = 0, at;
  while ((at = small.indexOf(wanted, from)) >= 0 && found.length < 400) { found.push(text.slice(from, at), make("mark", {}, text.slice(at, at + wanted.length))); from = at + wanted.length; }
  return [...found, text.slice(from)];
}

/** right, wrong or failed; empty for older runs, which did not record it. */
const verdict = (member) => member.reward === null ? "failed" : member.correct === null ? "" : member.correct ? "right" : "wrong";

function memberCard(group, member, tokens) {
  const pairs = [["advantage", number(member.advantage)], ["probability", percent(member.completion_prob)], ["weight", number(member.weight)], ["tokens", number(member.tokens)], ["ended by", member.finish_reason], ["weights", member.weights_version_first === null ? "–" : member.weights_version_first === member.weights_version_last ? `sync ${member.weights_version_first}` : `syncs ${member.weights_version_first}–${member.weights_version_last}`], ...(member.parts || []).map(([name, value]) => [`reward/${name}`, number(value)])];
  const judged = verdict(member), kind = { right: "good", failed: "bad" }[judged];
  return make("article", { class: `member ${member.kept ? "kept" : "dropped"}`, "aria-label": `Completion ${member.completion}` },
    make("div", { class: "row" }, make("b", {}, `#${member.completion}`), judged ? make("span", { class: `chip ${kind || ""}` }, judged === "failed" ? (["missing", "stopped early"].includes(member.why) ? member.why : "not graded") : judged) : null, member.reward === null ? null : make("span", { class: "chip" }, `reward ${number(member.reward)}`), make("span", { class: "chip" }, member.kept ? "trained on" : "pruned"), member.extracted !== null ? make("span", { class: "dim" }, "answer ", make("code", {}, member.extracted)) : null),
    make("p", { class: "why" }, reason(group, member), member.reward_why && member.why !== "stopped early" ? make("span", { class: "dim" }, ` Graded: ${member.reward_why}.`) : null), textOf(member, tokens), make("dl", {}, ...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))])));
}

function strip(group) {
  return make("span", { class: "strip", "aria-hidden": "true" }, ...group.members.map((one) => make("i", { class: `${verdict(one)}${one.kept ? "" : " out"}` })));
}
const matches = (group) => !browser.wanted || [group.prompt, group.title, group.reference, String(group.prompt_index), ...group.members.flatMap((one) => [one.text, one.extracted || "", one.why])].join("\n").toLowerCase().includes(browser.wanted.toLowerCase());
const meanReward = (group) => { const values = group.members.map((one) => one.reward).filter((value) => value !== null); return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null; };

function samples() {
  const ui = { run: make("select", { "aria-label": "Run" }, ...runs.map((run, place) => make("option", { value: place }, run.name))), step: make("select", { id: "sample-step", "aria-label": "Step" }), search: make("input", { type: "search", id: "sample-search", class: "grow", placeholder: "search prompts, completions, answers in all steps  ( / )", "aria-label": "Search the samples" }),
    paint: make("select", { "aria-label": "Colour of the tokens" }, make("option", { value: "surprisal" }, "surprisal"), make("option", { value: "difference" }, "engine − actor"), make("option", { value: "none" }, "no colour")), list: make("ul", { class: "groups", "aria-label": "Groups" }), detail: make("div", { class: "detail", "aria-live": "polite" }), note: make("p", { class: "note" }) };
  browser.ui = ui;
  ui.run.addEventListener("change", () => { browser.run = Number(ui.run.value); browser.step = null; fillSteps(); });
  ui.step.addEventListener("change", () => { browser.step = Number(ui.step.value); browser.group = telling(); fillGroups(); });
  ui.paint.addEventListener("change", () => { browser.paint = ui.paint.value; fillDetail(); });
  let timer;
  ui.search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => { browser.wanted = ui.search.value.trim(); fillSteps(); }, 150); });
  const back = make("button", { type: "button", title: "Previous step (p)", "aria-label": "Previous step", onclick: () => moveStep(-1) }, "‹"), on = make("button", { type: "button", title: "Next step (n)", "aria-label": "Next step", onclick: () => moveStep(1) }, "›");
  fillSteps();
  return section("samples", "Samples", `The members of a group side by side. ${report.legend}. Hover over a token for its probability.`, make("div", { class: "card" }, make("div", { class: "row" }, runs.length > 1 ? ui.run : null, "step", back, ui.step, on, ui.search, "tokens by", ui.paint), ui.note, make("div", { class: "browser" }, ui.list, ui.detail)));
}

/** The first group whose members differ in reward, else the first one. */
function telling() { return Math.max(0, groupsNow().findIndex((group) => new Set(group.members.map((one) => one.reward)).size > 1)); }

/** Steps that have a match for what is searched. */
const stepsNow = () => index(browser.run).steps.filter((step) => !browser.wanted || groupsOf(browser.run, step).some(matches));
function fillSteps() {
  const steps = stepsNow(), ui = browser.ui;
  if (!steps.includes(browser.step)) { browser.step = steps.length ? steps[steps.length - 1] : null; browser.group = telling(); }
  ui.step.replaceChildren(...steps.map((step) => make("option", { value: step, selected: step === browser.step }, String(step))));
  fillGroups();
}
function groupsNow() { return browser.step === null ? [] : groupsOf(browser.run, browser.step).filter(matches); }
function fillGroups() {
  const ui = browser.ui, groups = groupsNow(), at = index(browser.run);
  browser.group = Math.max(0, Math.min(browser.group, groups.length - 1));
  const all = at.groups_in_step[browser.step];
  ui.note.textContent = at.note || (groups.length ? `${groups.length} of ${all} recorded groups of step ${browser.step}; ${at.steps.length} of ${at.recorded_steps} recorded steps. The rest is in samples/ of the run.` : "Nothing found.");
  ui.list.replaceChildren(...groups.map((group, place) => make("li", {}, make("button", { type: "button", "aria-current": place === browser.group ? "true" : null, onclick: () => { browser.group = place; mark(); fillDetail(); } }, make("span", { class: "what" }, group.title), make("span", { class: "sub" }, strip(group), ` reward ${number(meanReward(group))} · ${group.members.filter((one) => one.kept).length} of ${group.members.length} kept`)))));
  fillDetail();
}
function mark() { [...browser.ui.list.querySelectorAll("button")].forEach((button, place) => place === browser.group ? button.setAttribute("aria-current", "true") : button.removeAttribute("aria-current")); }
function fillDetail() {
  const group = groupsNow()[browser.group], at = index(browser.run);
  if (!group) return browser.ui.detail.replaceChildren();
  const others = at.steps.filter((step) => step !== browser.step && groupsOf(browser.run, step).some((one) => one.prompt_index === group.prompt_index));
  const go = (step) => { browser.step = step; browser.ui.step.value = String(step); browser.group = Math.max(0, groupsNow().findIndex((one) => one.prompt_index === group.prompt_index)); const keep = browser.group; fillGroups(); browser.group = keep; mark(); };
  browser.ui.detail.replaceChildren(make("div", { class: "row" }, make("h3", {}, `Prompt ${group.prompt_index}`), group.source ? make("span", { class: "chip" }, group.source) : null, make("span", { class: "dim" }, "selected with probability ", make("b", {}, percent(group.prompt_prob)), ", weight ", make("b", {}, number(group.prompt_weight)), " · reference ", make("code", {}, group.reference)), others.length ? make("span", { class: "dim" }, "also in step ", ...others.slice(0, 12).flatMap((step) => [make("button", { type: "button", onclick: () => go(step) }, String(step)), " "])) : null),
    make("div", { class: "prompt mono", tabindex: "0", role: "group", "aria-label": "Prompt" }, ...(browser.wanted ? marked(group.prompt) : [group.prompt])), make("div", { class: "members" }, ...group.members.map((member) => memberCard(group, member, at.tokens))));
}
function moveGroup(by) { const count = groupsNow().length; if (!count) return; browser.group = Math.max(0, Math.min(count - 1, browser.group + by)); mark(); fillDetail(); browser.ui.list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" }); }
function moveStep(by) { const steps = stepsNow(), at = steps.indexOf(browser.step) + by; if (at >= 0 && at < steps.length) { browser.step = steps[at]; browser.ui.step.value = String(steps[at]); fillGroups(); } }
