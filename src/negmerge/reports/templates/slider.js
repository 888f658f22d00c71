// The slider stops at the measured λ of the chosen method, and shows what was measured there.
const slider = document.getElementById("slider");
if (slider) {
  const methods = JSON.parse(document.getElementById("slider-data").textContent);
  const pick = slider.querySelector("select"), range = slider.querySelector("input");
  const points = [...document.querySelectorAll("#sweeps .named")];
  const fill = (name, texts) => slider.querySelectorAll(`[data-${name}]`)
    .forEach((cell, k) => { cell.textContent = texts[k]; });
  const show = () => {
    const method = methods[pick.selectedIndex], stop = method.stops[range.value];
    const text = `λ = ${stop.scale}` + (stop.note && ` (${stop.note})`);
    slider.querySelector("output").textContent = text;
    range.setAttribute("aria-valuetext", text);
    fill("end", [method.stops[0].scale, method.stops.at(-1).scale]);
    fill("zero", method.stops[0].texts);
    fill("now", stop.texts);
    fill("chosen", method.stops[method.chosen].texts);
    points.forEach(point => point.classList.toggle("now", point.dataset.of === method.title
      && point.getAttribute("aria-label").startsWith(`${method.label}: λ = ${stop.scale},`)));
  };
  const restart = () => {
    const method = methods[pick.selectedIndex];
    range.max = method.stops.length - 1;
    range.value = method.chosen;
    show();
  };
  pick.addEventListener("change", restart);
  range.addEventListener("input", show);
  restart();  // a browser may keep a choice over a reload
}
