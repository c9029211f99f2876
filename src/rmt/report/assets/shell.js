// The theme: the system's, until the reader presses the button. Pages that draw listen for "themechange".
"use strict";
const theme = (() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const announce = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    document.dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    announce();
  });
  system.addEventListener("change", announce);
  announce();
  return { isDark };
})();
