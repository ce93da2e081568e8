// Sets the theme before the first paint; the settings call `pagodaTheme` again when it is changed.
globalThis.pagodaTheme = (choice) => {
  const root = document.documentElement;
  if (choice === "light" || choice === "dark") root.dataset.theme = choice;
  else delete root.dataset.theme;
};
try {
  globalThis.pagodaTheme(localStorage.getItem("pagoda-theme"));
} catch {
  // A browser that refuses storage follows the system.
}
