// The sample browser: a step, a group of it side by side, and why each completion was kept or not.
const browser = { run: 0, step: null, group: 0, paint: "surprisal", wanted: "", cache: new Map() };
const NO_SAMPLES = { steps: [], tokens: {}, groups_in_step: {}, note: "No samples." };
const REASONS = {
  rank: "Dropped by a fixed rule: its probability was 0.",
  "zero advantage": "Zero advantage: it has no gradient.",
  group: "Its whole group was dropped.",
  overlong: "Truncated, and truncated completions are filtered.",
  failed: "Its grading failed.",
  missing: "It was not sampled to its end.",
  "stopped early": "It was stopped at the limit drawn for it; the weights of others make up for it.",
};

/** What an element of the page holds; parsed when it is first asked for. */
function parsed(id) {
  const { cache } = browser;
  if (!cache.has(id)) cache.set(id, JSON.parse(byId(id)?.textContent || "null"));
  return cache.get(id);
}
const recordedSamples = () => parsed(`samples-${browser.run}`) || NO_SAMPLES;
const groupsOf = (step) => parsed(`samples-${browser.run}-${step}`) || [];

/** Groups of the step, and steps, that have a match for what is searched. */
const foundGroups = (step = browser.step) => groupsOf(step).filter(isFound);
const foundSteps = () => recordedSamples().steps.filter((step) => foundGroups(step).length);

function isFound(group) {
  if (!browser.wanted) return true;
  const ofMembers = group.members.flatMap((member) => [member.text, member.extracted || "", member.why]);
  const texts = [group.prompt, group.title, group.reference, group.prompt_index, ...ofMembers];
  return texts.join("\n").toLowerCase().includes(browser.wanted.toLowerCase());
}

/** The text with what is searched marked in it. */
function marked(text) {
  if (!browser.wanted) return [text];
  const wanted = browser.wanted.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"); // as it is, and no pattern
  const parts = text.split(new RegExp(`(${wanted})`, "gi"));
  return parts.map((part, place) => (place % 2 ? make("mark", {}, part) : part));
}

/** Why a completion was kept or not, in words. */
function reason({ why, kept, completion_prob: probability }) {
  const draw = kept ? "Kept by the draw" : "Dropped by the draw";
  if (why === "certain") return kept ? "Kept with certainty." : "Left out.";
  if (why === "score") return `${draw}: its score gave it ${percent(probability)}.`;
  if (why === "floor") return `${draw} at the floor of ${percent(probability)}.`;
  return REASONS[why] || why;
}

/** 0 to 1 for each token, by the chosen colouring; null without one, or if the run has not recorded it. */
function intensities({ logprobs, actor_logprobs: actor }) {
  if (browser.paint === "surprisal" && logprobs) return logprobs.map((value) => Math.min(1, -value / 4));
  if (browser.paint === "difference" && logprobs && actor) {
    return logprobs.map((value, position) => Math.min(1, Math.abs(value - actor[position]) / 0.5));
  }
  return null;
}

/** A completion: what is searched marked in it, or its tokens coloured. */
function completionText(member) {
  const box = make("div", { class: "text", tabindex: "0", role: "group", "aria-label": "Completion" });
  const { tokens } = recordedSamples();
  const values = member.token_ids && Object.keys(tokens).length && intensities(member);
  if (browser.wanted || !values) {
    box.append(...(browser.wanted ? marked(member.text) : [member.text || "(empty)"]));
    return box;
  }
  const token = (id, position) => {
    const logprob = member.logprobs[position];
    const actor = member.actor_logprobs ? `; actor ${format(member.actor_logprobs[position])}` : "";
    const alpha = (0.75 * values[position]).toFixed(2);
    const style = values[position] > 0.02 && `background: rgb(var(--heat) / ${alpha})`;
    const title = `p = ${format(Math.exp(logprob))}; log p = ${format(logprob)}${actor}`;
    return make("span", { style, title }, tokens[id] ?? "");
  };
  box.append(...member.token_ids.map(token));
  return box;
}

/** right, wrong or failed; empty for older runs, which did not record it. */
function judgement({ reward, correct }) {
  if (reward === null) return "failed";
  if (correct === null) return "";
  return correct ? "right" : "wrong";
}

function judgementChip(member) {
  const judged = judgement(member);
  if (judged !== "failed") return judged && chip(judged, judged === "right" ? "good" : "");
  return chip(["missing", "stopped early"].includes(member.why) ? member.why : "not graded", "bad");
}

/** Versions of the weights that sampled a completion, by the syncs before it. */
function weightsVersions({ weights_version_first: first, weights_version_last: last }) {
  if (first === null) return "–";
  return first === last ? `sync ${first}` : `syncs ${first}–${last}`;
}

function memberCard(member) {
  const figures = {
    advantage: format(member.advantage),
    probability: percent(member.completion_prob),
    weight: format(member.weight),
    tokens: format(member.tokens),
    "ended by": member.finish_reason,
    weights: weightsVersions(member),
  };
  for (const [name, value] of member.parts || []) figures[`reward/${name}`] = format(value);
  const head = div(
    "row",
    make("b", {}, `#${member.completion}`),
    judgementChip(member),
    member.reward !== null && chip(`reward ${format(member.reward)}`),
    chip(member.kept ? "trained on" : "pruned"),
    member.extracted !== null && span("dim", "answer ", code(member.extracted)),
  );
  const isGraded = member.reward_why && member.why !== "stopped early";
  const grading = isGraded && span("dim", ` Graded: ${member.reward_why}.`);
  const why = paragraph("why", reason(member), grading);
  const list = Object.entries(figures).map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  const kind = member.kept ? "member kept" : "member dropped";
  const attributes = { class: kind, "aria-label": `Completion ${member.completion}` };
  return make("article", attributes, head, why, completionText(member), make("dl", {}, list));
}

function samples() {
  const names = runs.map((run, number) => option(number, run.name));
  const paints = [option("surprisal"), option("difference", "engine − actor"), option("none", "no colour")];
  const search = {
    type: "search",
    class: "grow",
    "aria-label": "Search the samples",
    placeholder: "search prompts, completions, answers in all steps",
    oninput: searchSoon,
  };
  const ui = {
    run: select("Run", chooseRun, names),
    step: select("Step", chooseStep),
    search: make("input", search),
    paint: select("Colour of the tokens", choosePaint, paints),
    note: paragraph("note"),
    list: make("ul", { class: "groups", "aria-label": "Groups" }),
    detail: make("div", { class: "detail", "aria-live": "polite" }),
  };
  browser.ui = ui;
  fillSteps();
  const choices = [runs.length > 1 && ui.run, "step", ui.step, ui.search, "tokens by", ui.paint];
  const lead = `The members of a group side by side. ${report.legend}. Hover over a token for its probability.`;
  const card = div("card", div("row", choices), ui.note, div("browser", ui.list, ui.detail));
  return section("samples", "Samples", lead, card);
}

function chooseRun(event) {
  browser.run = Number(event.target.value);
  browser.step = null;
  fillSteps();
}

function chooseStep(event) {
  browser.step = Number(event.target.value);
  fillGroups(tellingGroup(browser.step));
}

function choosePaint(event) {
  browser.paint = event.target.value;
  fillDetail();
}

function searchSoon(event) {
  clearTimeout(browser.timer);
  browser.timer = setTimeout(() => {
    browser.wanted = event.target.value.trim();
    fillSteps();
  }, 150);
}

/** Index of the first group whose members differ in reward; -1: in none (the first one is shown). */
function tellingGroup(step) {
  return foundGroups(step).findIndex(({ members }) => new Set(members.map((member) => member.reward)).size > 1);
}

function fillSteps() {
  const steps = foundSteps();
  const stays = steps.includes(browser.step);
  if (!stays) browser.step = steps.at(-1) ?? null;
  const { step } = browser.ui;
  step.replaceChildren(...steps.map((one) => option(one, one, one === browser.step)));
  fillGroups(stays ? browser.group : tellingGroup(browser.step));
}

/** The groups of the step, of which the one at `place` is opened, or the nearest that there is. */
function fillGroups(place) {
  const { list, note } = browser.ui;
  const groups = foundGroups();
  list.replaceChildren(...groups.map((group, position) => make("li", {}, groupButton(group, position))));
  note.textContent = recordedSamples().note || foundNote(groups.length);
  openGroup(Math.max(0, Math.min(place, groups.length - 1)));
}

function foundNote(count) {
  const { steps, recorded_steps, groups_in_step } = recordedSamples();
  if (!count) return "Nothing found.";
  const groups = `${count} of ${groups_in_step[browser.step]} recorded groups of step ${browser.step}`;
  return `${groups}; ${steps.length} of ${recorded_steps} recorded steps. The rest is in samples/ of the run.`;
}

function groupButton({ title, members }, place) {
  const squares = members.map((member) => make("i", { class: `${judgement(member)}${member.kept ? "" : " out"}` }));
  const reward = mean(members.map((member) => member.reward).filter((value) => value !== null));
  const kept = members.filter((member) => member.kept).length;
  const strip = make("span", { class: "strip", "aria-hidden": "true" }, squares);
  const summary = span("sub", strip, ` reward ${format(reward)} · ${kept} of ${members.length} kept`);
  return button([span("what", title), summary], () => openGroup(place));
}

function openGroup(place) {
  browser.group = place;
  browser.ui.list.querySelectorAll("button").forEach((button, position) => {
    if (position === place) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  });
  fillDetail();
}

function fillDetail() {
  const { detail } = browser.ui;
  const group = foundGroups()[browser.group];
  if (!group) {
    detail.replaceChildren();
    return;
  }
  const title = make("h3", {}, `Prompt ${group.prompt_index}`);
  const head = div("row", title, group.source && chip(group.source), selection(group));
  const attributes = { class: "prompt mono", tabindex: "0", role: "group", "aria-label": "Prompt" };
  const prompt = make("div", attributes, marked(group.prompt));
  detail.replaceChildren(head, prompt, div("members", group.members.map(memberCard)));
}

function selection({ prompt_prob, prompt_weight, reference }) {
  const probability = make("b", {}, percent(prompt_prob));
  const weight = make("b", {}, format(prompt_weight));
  return span("dim", "selected with probability ", probability, ", weight ", weight, " · reference ", code(reference));
}
