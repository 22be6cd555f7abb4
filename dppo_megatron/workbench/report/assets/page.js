// The page put together: its sections with their links, dark or light.
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
byId("axis").addEventListener("change", (event) => {
  state.axis = event.target.value;
  redraw();
});
byId("smooth").addEventListener("input", (event) => {
  state.smooth = Number(event.target.value);
  redraw();
});
