// The theme chosen with the switch, before anything is painted. Without a choice the system decides.
try {
  const theme = localStorage.getItem("flashdraft.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // storage may be forbidden: the system decides
}
