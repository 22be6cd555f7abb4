// The page put together: sections, navigation, theme and keys.
document.title = `${runs.map((run) => run.name).join(", ").slice(0, 80)} · dppo-megatron`;
const SECTIONS = [["overview", "Runs", overview], ["learning", "Learning", learning], ["time", "Time", seconds], ["pruning", "Pruning", pruning], ["samples", "Samples", samples], ["warnings", "Warnings", warnings], ["settings", "Configuration", settings]];
assemble(SECTIONS, () => { if (browser.ui) fillDetail(); });
const here = new IntersectionObserver((entries) => { for (const entry of entries) if (entry.isIntersecting) for (const link of document.getElementById("nav").children) link.classList.toggle("here", link.hash === `#${entry.target.id}`); }, { rootMargin: "-15% 0px -75% 0px" });
for (const one of document.querySelectorAll("section")) here.observe(one);

document.getElementById("axis").addEventListener("change", (event) => { state.axis = event.target.value; redraw(); });
document.getElementById("smooth").addEventListener("input", (event) => { state.smooth = Number(event.target.value); redraw(); });
const keys = document.getElementById("keys");
document.getElementById("help").addEventListener("click", () => keys.showModal());

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
  const does = { j: () => moveGroup(1), k: () => moveGroup(-1), n: () => moveStep(1), p: () => moveStep(-1), t: flip, "?": () => keys.showModal(), "/": () => { document.getElementById("samples").scrollIntoView(); document.getElementById("sample-search").focus({ preventScroll: true }); } }[event.key];
  const section = SECTIONS[Number(event.key) - 1];
  if (does) { event.preventDefault(); does(); }
  else if (section) { location.hash = section[0]; document.getElementById(`${section[0]}-title`).focus({ preventScroll: true }); }
});
