// The page put together: sections, navigation, theme and keys.
document.title = `${runs.map((run) => run.name).join(", ").slice(0, 80)} · dppo-megatron`;
const SECTIONS = [["overview", "Runs", overview], ["learning", "Learning", learning], ["time", "Time", seconds], ["pruning", "Pruning", pruning], ["samples", "Samples", samples], ["warnings", "Warnings", warnings], ["settings", "Configuration", settings]];
const main = document.getElementById("main"), nav = document.getElementById("nav");
for (const [id, name, build] of SECTIONS) {
  nav.append(make("a", { href: `#${id}` }, name));
  main.append(build());
}
const here = new IntersectionObserver((entries) => { for (const entry of entries) if (entry.isIntersecting) for (const link of nav.children) link.classList.toggle("here", link.hash === `#${entry.target.id}`); }, { rootMargin: "-15% 0px -75% 0px" });
for (const one of main.querySelectorAll("section")) here.observe(one);

function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme;
  for (const dot of document.querySelectorAll("[data-colour]")) dot.style.background = colour(Number(dot.dataset.colour));
  redraw();
  if (browser.ui) fillDetail();
}
const flip = () => setTheme(state.theme === "dark" ? "light" : "dark");
document.getElementById("theme").addEventListener("click", flip);
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
let before;
addEventListener("beforeprint", () => { before = state.theme; if (before === "dark") setTheme("light"); drawAll(); });
addEventListener("afterprint", () => { if (before === "dark") setTheme("dark"); });
setTheme(state.theme);
