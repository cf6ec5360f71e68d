// What scrolls sideways can be reached and scrolled by keyboard.
"use strict";
(() => {
  const mark = () => document.querySelectorAll("article pre, article .table-wrapper").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  });
  window.addEventListener("load", mark);
  window.addEventListener("resize", mark);
})();
