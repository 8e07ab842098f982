// Applies the chosen theme before the first paint, so that the page does not flash. Runs as a classic script.
(() => {
  try {
    const theme = localStorage.getItem("nekro.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is switched off: the system's preference applies.
  }
})();
