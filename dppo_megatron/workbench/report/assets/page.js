// The page put together: sections, navigation, theme and keys.
const SECTIONS = [
  ["overview", "Runs", overview],
  ["learning", "Learning", learning],
  ["time", "Time", time],
  ["pruning", "Pruning", pruning],
  ["samples", "Samples", samples],
  ["warnings", "Warnings", warnings],
  ["settings", "Configuration", configuration],
];
const names = runs.map((run) => run.name).join(", ");
document.title = `${names.slice(0, 80)} · dppo-megatron`;
assemble(SECTIONS);

/** Mark the section that is read in the navigation. */
function markSection(entries) {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    for (const link of document.querySelectorAll("#nav a")) {
      link.classList.toggle("here", link.hash === `#${target.id}`);
    }
  }
}
const reading = new IntersectionObserver(markSection, { rootMargin: "-15% 0px -75% 0px" });
for (const one of document.querySelectorAll("section")) reading.observe(one);

byId("axis").addEventListener("change", (event) => {
  state.axis = event.target.value;
  redraw();
});
byId("smooth").addEventListener("input", (event) => {
  state.smooth = Number(event.target.value);
  redraw();
});
const keys = byId("keys");
byId("help").addEventListener("click", () => keys.showModal());

const focusOn = (id) => byId(id).focus({ preventScroll: true });

const ACTIONS = {
  j: () => moveGroup(1),
  k: () => moveGroup(-1),
  n: () => moveStep(1),
  p: () => moveStep(-1),
  t: flipTheme,
  "?": () => keys.showModal(),
  "/": () => {
    byId("samples").scrollIntoView();
    focusOn("sample-search");
  },
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const [id] = SECTIONS[Number(event.key) - 1] || [];
  if (id) {
    location.hash = id;
    focusOn(`${id}-title`);
  }
  if (!ACTIONS[event.key]) return;
  event.preventDefault();
  ACTIONS[event.key]();
});
