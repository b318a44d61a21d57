"use strict";
// Whatever has a data-tip attribute shows it beside the pointer.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  document.addEventListener("pointermove", (event) => {
    const over = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    tip.hidden = over === null;
    if (over === null) return;
    tip.textContent = over.getAttribute("data-tip");
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18;
    const fits = below + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 12}px`;
  });
  document.addEventListener("pointerleave", () => { tip.hidden = true; });
})();
