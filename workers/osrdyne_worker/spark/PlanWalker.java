import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.IdentityHashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.trees.Origin;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.catalyst.util.MapData;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.unsafe.types.CalendarInterval;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Writes a Catalyst plan as a flat JSON list of everything that is in it. `TreeNode.toJSON` leaves out maps, sequences
 * of mixed elements and the plans inside other objects; a check of its output would miss these.
 *
 * Compiled by Janino when a session starts (see spark/java/janino.py): only Java that Janino supports is used.
 *
 * Each object that is a node of a tree, a case class or of an unknown class becomes
 *   {"class", "parent": index in the list or -1, "field": path in the parent, "kind": "tree", "data" or "opaque",
 *    "ours": true for a view of the key, whose plan is left out,
 *    "plan": true for a plan, "hidden": true for what is in no parameter of its parent,
 *    "values": {path: text, number, boolean, a list of texts, or the size of another collection},
 *    "nulls": [field, ...]}
 * "nulls" has the fields that are null although their type holds expressions, plans or collections of them.
 * A node of a tree is listed once, where it occurs first. Where a parsed plan holds it again, there is an item of the
 * kind "again", without a class, and its value "of" is the index of the node.
 * The "value" of a literal has at most the first characters of a text; "bytes" is its whole length,
 * and "nesting" the most brackets within brackets in all of it.
 */
public final class PlanWalker {
    private static final int LONGEST_LITERAL = 1000;
    private static final Map FIELDS = java.util.Collections.synchronizedMap(new HashMap());

    private final StringBuilder out = new StringBuilder("[");
    private final IdentityHashMap seen = new IdentityHashMap();
    private final ArrayDeque pending = new ArrayDeque();
    private final java.util.Collection views;
    private final boolean analyzed;
    private int count = 0;

    private static final Method OTHER_ARGUMENTS = otherArguments();

    private PlanWalker(java.util.Collection views, boolean analyzed) {
        this.views = views;
        this.analyzed = analyzed;
    }

    /** `views`: names, in lower case, of the temporary views whose plans are left out. */
    public static String walk(Object plan, java.util.Collection views, Boolean analyzed) throws Exception {
        PlanWalker walker = new PlanWalker(views, analyzed.booleanValue());
        walker.pending.push(new Object[] {plan, Integer.valueOf(-1), "", Boolean.TRUE});
        while (!walker.pending.isEmpty()) {
            Object[] next = (Object[]) walker.pending.pop();
            walker.write(next[0], ((Integer) next[1]).intValue(), (String) next[2], ((Boolean) next[3]).booleanValue());
        }
        return walker.out.append("]").toString();
    }

    private void write(Object value, int parent, String path, boolean declared) throws Exception {
        boolean tree = value instanceof TreeNode;
        boolean product = value instanceof scala.Product;
        if (!declared && !tree && !product) {
            return;  // a cached value of the object, not one of its parameters
        }
        boolean once = tree || !product || !declared;
        Integer before = (Integer) seen.get(value);
        if (once && before != null && !(tree && declared && !analyzed)) {
            return;
        }
        boolean again = once && before != null;
        int index = count++;
        out.append(index == 0 ? "" : ",").append("{\"class\":");
        quote(again ? "" : value.getClass().getName());
        out.append(",\"parent\":").append(parent).append(",\"field\":");
        quote(path);
        if (again) {
            out.append(",\"kind\":\"again\",\"values\":{\"of\":").append(before.intValue()).append("},\"nulls\":[]}");
            return;
        }
        if (once) {
            seen.put(value, Integer.valueOf(index));
        }
        out.append(",\"kind\":\"").append(tree ? "tree" : product ? "data" : "opaque").append("\",");
        out.append(value instanceof LogicalPlan ? "\"plan\":true," : "").append(declared ? "" : "\"hidden\":true,");
        out.append(isView(value) ? "\"ours\":true," : "").append("\"values\":{");
        List below = new ArrayList();
        List nulls = new ArrayList();
        List scalars = new ArrayList();
        if (tree || product) {
            scala.Product fields = (scala.Product) value;
            boolean literal = value.getClass().getName().equals("org.apache.spark.sql.catalyst.expressions.Literal");
            boolean ours = isView(value);
            for (int i = 0; i < fields.productArity(); i++) {
                String name = fields.productElementName(i);
                Object element = fields.productElement(i);
                if (ours && element instanceof TreeNode) {
                    continue;
                }
                if (element == null) {
                    if (tree && holdsNodes(value.getClass(), name)) {
                        nulls.add(name);
                    }
                } else {
                    collect(element, name, below, scalars);
                    if (literal) {
                        describe(element, name, scalars);
                    }
                }
            }
            for (int i = 0; i < scalars.size(); i++) {
                Object[] scalar = (Object[]) scalars.get(i);
                out.append(i == 0 ? "" : ",");
                quote((String) scalar[1]);
                out.append(":");
                scalar(scalar[0], literal);
            }
        }
        out.append("},\"nulls\":[");
        for (int i = 0; i < nulls.size(); i++) {
            out.append(i == 0 ? "" : ",");
            quote((String) nulls.get(i));
        }
        out.append("]}");
        List hidden = new ArrayList();
        if (tree && !isView(value)) {
            // The second parameter list of a case class is not among its product elements.
            collect(OTHER_ARGUMENTS.invoke(value, new Object[0]), "others", below, null);
            if (!analyzed) {
                // Fields that are not parameters are written as well. An analysed plan caches other plans in them.
                Field[] all = fieldsOf(value.getClass());
                for (int i = 0; i < all.length; i++) {
                    collect(all[i].get(value), all[i].getName(), hidden, null);
                }
            }
        }
        push(hidden, index, false);
        push(below, index, true);
    }

    private void push(List found, int parent, boolean declared) {
        for (int i = found.size() - 1; i >= 0; i--) {
            Object[] item = (Object[]) found.get(i);
            pending.push(new Object[] {item[0], Integer.valueOf(parent), item[1], Boolean.valueOf(declared)});
        }
    }

    /**
     * Adds the objects in `value` to `found`, and texts, numbers and the sizes of collections to `scalars` (unless
     * null): those in collections, options, tuples, arrays and maps one by one.
     */
    private static void collect(Object value, String path, List found, List scalars) {
        if (value == null || isData(value) || value instanceof Origin) {
            return;
        }
        if (isScalar(value) || isTexts(value)) {
            note(value, path, scalars);
        } else if (value instanceof TreeNode) {
            found.add(new Object[] {value, path});
        } else if (value instanceof scala.Option) {
            scala.Option option = (scala.Option) value;
            if (option.isDefined()) {
                collect(option.get(), path, found, scalars);
            }
        } else if (value instanceof scala.collection.Iterable) {
            int i = 0;
            scala.collection.Iterator items = ((scala.collection.Iterable) value).iterator();
            while (items.hasNext()) {
                collect(items.next(), path + "." + i++, found, scalars);
            }
            note(Integer.valueOf(i), path, scalars);
        } else if (value instanceof Iterable) {
            int i = 0;
            Iterator items = ((Iterable) value).iterator();
            while (items.hasNext()) {
                collect(items.next(), path + "." + i++, found, scalars);
            }
            note(Integer.valueOf(i), path, scalars);
        } else if (value instanceof Map) {
            collect(((Map) value).keySet(), path + ".keys", found, scalars);
            collect(((Map) value).values(), path + ".values", found, scalars);
            note(Integer.valueOf(((Map) value).size()), path, scalars);
        } else if (value instanceof Object[]) {
            Object[] items = (Object[]) value;
            for (int i = 0; i < items.length; i++) {
                collect(items[i], path + "." + i, found, scalars);
            }
            note(Integer.valueOf(items.length), path, scalars);
        } else if (value.getClass().getName().startsWith("scala.Tuple")) {
            scala.Product tuple = (scala.Product) value;
            for (int i = 0; i < tuple.productArity(); i++) {
                collect(tuple.productElement(i), path + "." + i, found, scalars);
            }
        } else if (!value.getClass().isArray()) {  // arrays of primitives contain no objects
            found.add(new Object[] {value, path});
        }
    }

    private static void note(Object value, String path, List scalars) {
        if (scalars != null) {
            scalars.add(new Object[] {value, path});
        }
    }

    /** What else is known about the value of a literal: its length, and the text of an interval. */
    private static void describe(Object value, String name, List scalars) {
        if (value instanceof UTF8String) {
            note(Integer.valueOf(((UTF8String) value).numBytes()), "bytes", scalars);
            note(Integer.valueOf(nesting((UTF8String) value)), "nesting", scalars);
        } else if (value instanceof byte[]) {
            note(Integer.valueOf(((byte[]) value).length), "bytes", scalars);
        } else if (value instanceof ArrayData) {
            note(Integer.valueOf(((ArrayData) value).numElements()), "items", scalars);
        } else if (value instanceof CalendarInterval) {
            note(value.toString(), name, scalars);
        }
    }

    /** The most brackets within brackets in a text, also in one that closes brackets of another one. */
    private static int nesting(UTF8String text) {
        int depth = 0;
        int deepest = 0;
        byte[] bytes = text.getBytes();
        for (int i = 0; i < bytes.length; i++) {
            if (bytes[i] == '<' || bytes[i] == '(' || bytes[i] == '[' || bytes[i] == '{') {
                deepest = Math.max(deepest, ++depth);
            } else if (bytes[i] == '>' || bytes[i] == ')' || bytes[i] == ']' || bytes[i] == '}') {
                depth = Math.max(0, depth - 1);
            }
        }
        return deepest;
    }

    private boolean isView(Object node) {
        if (!node.getClass().getName().equals("org.apache.spark.sql.catalyst.plans.logical.View")) {
            return false;
        }
        org.apache.spark.sql.catalyst.plans.logical.View view = (org.apache.spark.sql.catalyst.plans.logical.View) node;
        return view.isTempView()
            && !view.desc().identifier().database().isDefined()
            && views.contains(view.desc().identifier().table().toLowerCase(java.util.Locale.ROOT));
    }

    private static boolean isScalar(Object value) {
        return value instanceof String || value instanceof UTF8String || value instanceof Number
            || value instanceof Boolean || value instanceof Character || value instanceof Enum
            || value instanceof DataType || value instanceof org.apache.spark.sql.types.Decimal
            || value instanceof Class;
    }

    /** Rows, arrays and maps of values: they contain no expressions, and a VALUES clause may have thousands. */
    private static boolean isData(Object value) {
        return value instanceof InternalRow || value instanceof ArrayData || value instanceof MapData;
    }

    private static boolean isTexts(Object value) {
        if (!(value instanceof scala.collection.Seq)) {
            return false;
        }
        scala.collection.Iterator items = ((scala.collection.Seq) value).iterator();
        while (items.hasNext()) {
            if (!(items.next() instanceof String)) {
                return false;
            }
        }
        return true;
    }

    private void scalar(Object value, boolean literal) {
        if (value instanceof scala.collection.Seq && !(value instanceof DataType)) {
            out.append("[");
            scala.collection.Iterator items = ((scala.collection.Seq) value).iterator();
            boolean first = true;
            while (items.hasNext()) {
                out.append(first ? "" : ",");
                quote((String) items.next());
                first = false;
            }
            out.append("]");
        } else if (value instanceof Boolean || value instanceof Integer || value instanceof Long
            || value instanceof Short || value instanceof Byte) {
            out.append(value.toString());
        } else if (literal && value instanceof UTF8String && ((UTF8String) value).numBytes() > LONGEST_LITERAL) {
            quote(((UTF8String) value).substring(0, LONGEST_LITERAL).toString());
        } else if (value instanceof DataType) {
            quote(((DataType) value).simpleString());
        } else {
            quote(value.toString());
        }
    }

    /** Whether a field's type can hold expressions or plans. `owner` is a class of tree nodes. */
    private static boolean holdsNodes(Class owner, String name) {
        for (Class type = owner; type != null; type = type.getSuperclass()) {
            try {
                Class kind = type.getDeclaredField(name).getType();
                return TreeNode.class.isAssignableFrom(kind) || scala.Option.class.isAssignableFrom(kind)
                    || scala.collection.Iterable.class.isAssignableFrom(kind) || scala.Product.class == kind;
            } catch (NoSuchFieldException absent) {
                continue;
            }
        }
        return true;
    }

    private static Method otherArguments() {
        try {
            Method method = TreeNode.class.getDeclaredMethod("otherCopyArgs", new Class[0]);
            method.setAccessible(true);
            return method;
        } catch (NoSuchMethodException absent) {
            throw new IllegalStateException(absent);
        }
    }

    private static Field[] fieldsOf(Class owner) {
        Field[] known = (Field[]) FIELDS.get(owner);
        if (known != null) {
            return known;
        }
        List found = new ArrayList();
        for (Class type = owner; type != null && type != Object.class; type = type.getSuperclass()) {
            Field[] declared = type.getDeclaredFields();
            for (int i = 0; i < declared.length; i++) {
                if (!Modifier.isStatic(declared[i].getModifiers()) && !declared[i].getType().isPrimitive()) {
                    declared[i].setAccessible(true);
                    found.add(declared[i]);
                }
            }
        }
        known = (Field[]) found.toArray(new Field[found.size()]);
        FIELDS.put(owner, known);
        return known;
    }

    private void quote(String text) {
        out.append('"');
        for (int i = 0; i < text.length(); i++) {
            char c = text.charAt(i);
            if (c == '"' || c == '\\') {
                out.append('\\').append(c);
            } else if (c < ' ' || c > '~') {
                String code = Integer.toHexString(c);
                out.append("\\u").append("0000".substring(code.length())).append(code);
            } else {
                out.append(c);
            }
        }
        out.append('"');
    }
}
