// Small things that the browser keeps. One that refuses storage forgets them, and the page works on.

const within = (area) => ({
  get(name) {
    try {
      return area().getItem(name) ?? "";
    } catch {
      return "";
    }
  },
  // An empty value is removed.
  set(name, value) {
    try {
      if (value) area().setItem(name, value);
      else area().removeItem(name);
    } catch {
      // It lasts as long as the page, then.
    }
  },
});

export const inBrowser = within(() => localStorage);
export const inTab = within(() => sessionStorage);
