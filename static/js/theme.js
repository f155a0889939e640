// Runs before the first paint (a classic script in <head>): theme and rail as the user left them.
(() => {
  const root = document.documentElement;
  const stored = (key) => {
    try { return localStorage.getItem(key); } catch { return null; } // storage may be forbidden
  };
  const theme = stored("qd.theme");
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  if (stored("qd.rail") === "icons") root.dataset.rail = "icons";
})();
